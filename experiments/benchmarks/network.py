"""Training over links of a known rate: hosts on this machine, methods and schedules in turn, measured and predicted.

Reports a step's time beside what no step can be faster than (the larger of its computation, measured without
communication on the same hosts, and of its bytes at the rate of the link), what the kernel counted on the links beside
what each method counts itself, and the time that the planner predicts from profiles taken on the same hosts in the
same run. Needs root on Linux.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.console import Console
from rich.table import Table

import micro
from experiments.benchmarks.network_training import CPU, DDP, FP16, POWERSGD, begin_training, config_of, train_steps
from experiments.config.builders import build_reducer
from experiments.config.errors import UserError, suggestion
from experiments.config.schema import TrainConfig
from experiments.launching.measurements import Row, Settings
from experiments.launching.namespaces import Hosts, bits_per_s
from experiments.launching.rank_group import RankGroup
from experiments.profiles import backward, link, select
from experiments.reports.figure_parts import head, new_figure, save
from experiments.reports.names import label
from experiments.reports.plot_style import BLUE, PAGE_INCHES, VERMILLION, style
from experiments.studies.simulated_steps.trace_changes import rescaled
from experiments.training.schedule_problem import problem_of
from micro.planning.schedules.base import Problem, Schedule
from micro.planning.traces import Curve, LinkTable, SelectTable, Trace

NAME = "network"
WARMUP = 4  # DDP settles its buckets after the first step, PowerSGD starts after the second
PROFILED_STEPS = 8
DEFAULTS = [
    "model=resnet18",
    "dataset=synthetic",
    "dataset.settings={num_samples: 512, image_size: 32, channels: 3, num_classes: 10}",
    "batch_size=2",
]
CHOICES = (
    "ddp,dense:layerwise,dense:single,dense:mgwfbp,dense:exact,"
    "micro,micro:sparse_exact,cltk,topk,oktopk,torch_fp16,torch_powersgd"
)
TICKS = [digit * 10.0**power for power in range(-4, 4) for digit in (1, 2, 5)]
FRAME = 1514 / 1448  # bytes on the wire for those of a full segment: Ethernet, IP and TCP headers with time stamps
OF_TORCH = {DDP: "DDP", FP16: "DDP's fp16 hook", POWERSGD: "DDP's PowerSGD hook"}
LINK_SIZES = [64, 4096, 65_536, 2**18, 2**20, 2**22, 2**24]
SETTLED = ("sparsifier", "schedule", "cluster", "output", "density")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument("--rates", default="100mbit,1gbit", metavar="A,B", help="of the links (%(default)s)")
    parser.add_argument("--hosts", type=int, default=4, help="with one rank each (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="that count, after a warm-up (%(default)s)")
    parser.add_argument("--density", type=float, default=0.01, help="asked of the sparse methods (%(default)s)")
    parser.add_argument(
        "--methods",
        default=CHOICES,
        metavar="A,B",
        help=f"names of conf/sparsifier, with :SCHEDULE where DDP shall make its buckets by one, and {DDP}, {FP16}, "
        f"{POWERSGD}: torch's own (%(default)s)",
    )
    parser.add_argument("--link-seconds", type=float, default=60.0, help="to measure each rate for (%(default)s)")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="model, dataset and so on, as for train; ResNet-18 on drawn 32 x 32 images when none is given",
    )


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the table and the figure.

    Raises:
        UserError: a mistake, or a machine that can have no hosts; nothing is started then.
        RankFailure: a rank failed.
    """
    asked = Asked.of(arguments)
    with Hosts(asked.num_hosts) as hosts, RankGroup(asked.num_hosts, prefixes=hosts.prefixes()) as ranks:
        with console.status("profiling the model and the methods"):
            known = _profile(asked, ranks)
        rows = []
        for rate in asked.rates:
            hosts.shape(rate)
            with console.status(f"{rate}: measuring the link"):
                network = _measure_link(asked, ranks, rate)
            for setup in asked.setups:
                with console.status(f"{rate}: {setup.name}"):
                    rows.append(_measure(asked, setup, Prediction(known, network), hosts, ranks, rate))
    frame = _compared(pd.DataFrame(rows))
    console.print(_table(frame, asked))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for path in save(_draw(frame, asked.title), frame, arguments.out / NAME):
        console.print(f"wrote {path}")


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to train: a method, and the schedule that makes its buckets.

    Attributes:
        method: one of torch's own, or a name of conf/sparsifier.
        schedule: None where the method brings its own: DDP's buckets for dense, one for everything else.
        config: of the training, as the ranks have it.
    """

    method: str
    schedule: Schedule | None
    config: TrainConfig
    overrides: list[str]

    @property
    def name(self) -> str:
        """How it is chosen on the command line."""
        return f"{self.method}:{self.schedule.name}" if self.schedule else self.method

    @property
    def title(self) -> str:
        """How it is called in tables and figures."""
        base = OF_TORCH.get(self.method) or label(self.method)
        return f"{base}, {self.schedule.name}" if self.schedule else base

    @property
    def reducer(self) -> micro.Reducer:
        """What reduces the gradients; dense stands for torch's own."""
        return build_reducer(self.config)


@dataclass(frozen=True, slots=True)
class Asked:
    """What to measure, checked to the last."""

    rates: list[str]
    num_hosts: int
    steps: int
    density: float
    setups: list[Setup]
    overrides: list[str]
    link_s: float

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Asked":
        """Read the options.

        Raises:
            UserError: a mistake.
        """
        rates = [rate for rate in arguments.rates.split(",") if rate]
        for rate in rates:
            bits_per_s(rate)
        for key, given, lowest in (
            ("rates", len(rates), 1),
            ("hosts", arguments.hosts, 2),
            ("steps", arguments.steps, 1),
            ("link-seconds", arguments.link_seconds, 1),
        ):
            if not given >= lowest:
                raise UserError(f"--{key} must be at least {lowest}, got {given:g}")
        overrides = arguments.overrides or DEFAULTS
        for word in overrides:
            if word.split("=")[0].split(".")[0] in SETTLED:
                raise UserError(f"'{word}': this benchmark sets it itself; see --methods and --density")
        words = [*overrides, f"density={arguments.density!r}"]
        setups = [_setup(word, words, arguments.hosts) for word in dict.fromkeys(arguments.methods.split(",")) if word]
        if not setups:
            raise UserError("--methods names none")
        return cls(
            rates, arguments.hosts, arguments.steps, arguments.density, setups, words, float(arguments.link_seconds)
        )

    @property
    def title(self) -> str:
        """What was trained, on what."""
        config = self.setups[0].config
        where = f"batch {config.batch_size} on each of {self.num_hosts} hosts"
        return f"{config.model.name} on {config.dataset.name}, {where}, density {self.density:g}"


def _setup(word: str, overrides: list[str], num_hosts: int) -> Setup:
    method, _, wanted = word.partition(":")
    if wanted and method in OF_TORCH:
        raise UserError(f"{method} makes its own buckets, got '{word}': leave :{wanted} out")
    schedule = _schedule(wanted) if wanted else None
    words = [*overrides, f"schedule={wanted}"] if schedule and not schedule.is_planned else overrides
    return Setup(method, schedule, config_of(method, words, num_hosts), words)


def _schedule(name: str) -> Schedule:
    runnable = [known for known in micro.known(Schedule) if micro.build(Schedule, known).runs]
    if name not in runnable:
        raise UserError(f"a schedule must be one of {', '.join(runnable)}, got '{name}'{suggestion(name, runnable)}")
    return micro.build(Schedule, name)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step takes, from what was measured of the model, of the methods and of the link."""

    known: "Known"
    network: LinkTable

    def problem(self, setup: Setup, *, slower: float = 1.0) -> Problem | None:
        """Return what a schedule decides on; None where nobody measured what the method computes.

        Args:
            slower: by how much computation now takes longer than when it was profiled.
        """
        if setup.method == POWERSGD:
            return None
        known, n = self.known.slowed(slower), self.network.world_size
        problem = problem_of(
            known.trace, self.network, setup.reducer, n, select=known.select, method=setup.config.sparsifier.name
        )
        if setup.method == FP16:
            return replace(problem, exchange=lambda num_bytes: self.network.seconds("all_reduce", num_bytes / 2))
        return problem

    def schedule(self, setup: Setup) -> Schedule:
        """Return the schedule that makes a method's buckets."""
        own = "ddp" if setup.config.sparsifier.is_dense else "single"
        return setup.schedule or micro.build(Schedule, own)

    def step_s(self, setup: Setup, *, compute_s: float) -> float:
        """Return the seconds of a step; NaN where they cannot be told.

        Args:
            compute_s: what a step without communication took beside the steps that are predicted: the machine may have
                become slower or faster since the profiles, on which the plan was made.
        """
        planned, now = self.problem(setup), self.problem(setup, slower=compute_s / self.known.trace.compute_s)
        if planned is None or now is None:
            return math.nan
        schedule = self.schedule(setup)
        return schedule.timeline(now, schedule.cut(planned)).step_s


@dataclass(frozen=True, slots=True)
class Known:
    """What was measured whatever the rate of the links is."""

    trace: Trace
    select: SelectTable | None

    def slowed(self, factor: float) -> "Known":
        """Return the same with all computation longer by a factor."""
        trace = rescaled(self.trace, factor * self.trace.compute_s)
        if self.select is None:
            return Known(trace, None)
        curves = {
            name: Curve(sizes=curve.sizes, seconds=tuple(factor * seconds for seconds in curve.seconds))
            for name, curve in self.select.methods.items()
        }
        return Known(trace, replace(self.select, methods=curves))


def _profile(asked: Asked, ranks: RankGroup) -> Known:
    words = [word for word in asked.overrides if not word.startswith("density=")]
    options = argparse.Namespace(steps=PROFILED_STEPS, overrides=words)
    rows = _profiled(ranks, backward, backward.prepare(options, asked.num_hosts))
    trace = backward.merge(rows)
    sparse = list(dict.fromkeys(s.method for s in asked.setups if not s.config.sparsifier.is_dense))
    if not sparse:
        return Known(trace, None)
    lengths = sorted({1024, max(2048, trace.numel // 16), max(4096, trace.numel)})
    options = argparse.Namespace(methods=",".join(sparse), density=asked.density, numel=lengths, steps=PROFILED_STEPS)
    rows = _profiled(ranks, select, select.prepare(options, asked.num_hosts))
    curves = {row["method"]: Curve(sizes=tuple(row["numel"]), seconds=tuple(row["seconds"])) for row in rows}
    return Known(trace, SelectTable(world_size=asked.num_hosts, density=asked.density, methods=curves))


def _profiled(ranks: RankGroup, profile: ModuleType, settings: Settings) -> list[Row]:
    rows: list[Row] = ranks.call(profile.work, settings, CPU, _no_progress)[0]
    return rows


def _no_progress() -> None:
    """Show no progress of the ranks: this process does."""


def _measure_link(asked: Asked, ranks: RankGroup, rate: str) -> LinkTable:
    options = argparse.Namespace(sizes=LINK_SIZES, repeats=10, seconds=asked.link_s)
    rows = _profiled(ranks, link, link.prepare(options, asked.num_hosts))
    curves: dict[Any, Curve] = {
        row["op"]: Curve(sizes=tuple(row["sizes"]), seconds=tuple(row["seconds"])) for row in rows
    }
    return LinkTable(world_size=asked.num_hosts, backend="gloo", link=rate, collectives=curves)


def _measure(asked: Asked, setup: Setup, prediction: Prediction, hosts: Hosts, ranks: RankGroup, rate: str) -> Row:
    """Train some steps over the links as they are shaped now, and return what was seen."""
    plan = None
    problem = prediction.problem(setup)
    if setup.schedule and setup.schedule.is_planned:
        assert problem
        made = setup.schedule.plan(problem)
        plan = {"format": made.format, "schedule": made.schedule, "groups": made.groups, "num_bytes": made.num_bytes}
    ranks.call(begin_training, setup.method, setup.overrides, plan)
    ranks.call(train_steps, WARMUP)
    before = hosts.counters()
    answers = ranks.call(train_steps, asked.steps)
    sent = [now - then for now, then in zip(hosts.counters(), before, strict=True)]
    slowest, compute_s = (
        [max(seconds) for seconds in zip(*(answer[key] for answer in answers), strict=True)]
        for key in ("seconds", "compute")
    )
    return {
        "rate": rate,
        "method": setup.name,
        "title": setup.title,
        "step_s": statistics.fmean(slowest),
        "least_s": min(slowest),
        "most_s": max(slowest),
        "samples_per_s": asked.num_hosts * setup.config.batch_size / statistics.fmean(slowest),
        "link_bytes": statistics.fmean(one.payload_bytes for one in sent) / asked.steps,
        "counted_bytes": statistics.fmean(statistics.fmean(answer["bytes"]) for answer in answers),
        "predicted_s": prediction.step_s(setup, compute_s=statistics.fmean(compute_s)),
        "compute_s": statistics.fmean(compute_s),
        "wire_s": FRAME * 8 * statistics.fmean(one.payload_bytes for one in sent) / asked.steps / bits_per_s(rate),
    }


def _compared(frame: pd.DataFrame) -> pd.DataFrame:
    """Add what follows from the numbers: how much faster than DDP, and how well bytes and predictions agree."""
    dense = frame[frame["method"] == DDP].set_index("rate")["step_s"]
    return frame.assign(
        times_ddp=frame["rate"].map(dense) / frame["step_s"],
        link_share=frame["link_bytes"] / frame["counted_bytes"],
        predicted_share=frame["predicted_s"] / frame["step_s"],
        over_bound=frame["step_s"] / frame[["compute_s", "wire_s"]].max(axis="columns"),
    )


def _table(frame: pd.DataFrame, asked: Asked) -> Table:
    table = Table(title=f"{asked.title}; means of {asked.steps} steps")
    columns = {
        "step s": ("step_s", "{:.4g}"),
        "compute": ("compute_s", "{:.3g}"),
        "wire": ("wire_s", "{:.3g}"),
        "step / max": ("over_bound", "{:.2f}"),
        "samples / s": ("samples_per_s", "{:.4g}"),
        "times DDP": ("times_ddp", "{:.2f}"),
        "link MB": ("link_bytes", "{:.4g}"),
        "counted MB": ("counted_bytes", "{:.4g}"),
        "link / ours": ("link_share", "{:.3f}"),
        "predicted": ("predicted_s", "{:.4g}"),
        "pred. / step": ("predicted_share", "{:.2f}"),
    }
    table.add_column("link")
    table.add_column("method")
    for name in columns:
        table.add_column(name, justify="right")
    for row in frame.to_dict("records"):
        numbers = [(row[key] / 1e6 if name.endswith("MB") else row[key], form) for name, (key, form) in columns.items()]
        table.add_row(row["rate"], row["title"], *("-" if math.isnan(x) else form.format(x) for x, form in numbers))
    return table


@style()
def _draw(frame: pd.DataFrame, title: str) -> Figure:
    """A step's time by method, measured (from the fastest to the slowest step) and predicted, a panel per rate."""
    rates = list(dict.fromkeys(frame["rate"]))
    names = list(dict.fromkeys(frame["title"]))
    figure = new_figure(PAGE_INCHES, 1.2 + 0.26 * len(names))
    panels: Sequence[Any] = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    for axes, rate in zip(panels, rates, strict=True):
        rows = frame[frame["rate"] == rate]
        places = [names.index(name) for name in rows["title"]]
        axes.hlines(places, rows["least_s"], rows["most_s"], color=BLUE, linewidth=2.5, alpha=0.5)
        handles = [
            axes.scatter(rows["step_s"], places, s=22, color=BLUE, zorder=3, label="measured"),
            axes.scatter(rows["predicted_s"], places, s=34, marker="|", color=VERMILLION, zorder=4, label="predicted"),
        ]
        axes.set(xscale="log", xlabel=f"seconds of a step at {rate}", yticks=range(len(names)), yticklabels=names)
        first, last = 0.8 * min(frame["least_s"].min(), frame["predicted_s"].min()), 1.25 * frame["most_s"].max()
        ticks = [tick for tick in TICKS if first <= tick <= last]
        axes.set(xlim=(first, last), xticks=ticks, xticklabels=[f"{tick:g}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    panels[0].invert_yaxis()
    head(figure, title, handles)
    return figure
