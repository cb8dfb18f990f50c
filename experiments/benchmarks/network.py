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
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.network_prediction import Prediction, measure_link, take_profiles
from experiments.benchmarks.network_settings import NetworkSettings, Setup
from experiments.benchmarks.network_training import DDP, FP16, POWERSGD, begin_training, train_steps
from experiments.config.command_line import add_settings, comma_list
from experiments.config.option_types import to_density, to_positive, whole_number
from experiments.launching.measurements import Row
from experiments.launching.namespaces import Hosts, bits_per_s
from experiments.launching.rank_group import RankGroup
from experiments.reports.figure_parts import head, new_figure, save
from experiments.reports.output import write_or_rescue
from experiments.reports.plot_style import BLUE, PAGE_INCHES, VERMILLION, style

NAME = "network"
WARMUP = 4  # DDP settles its buckets after the first step, PowerSGD starts after the second
CHOICES = (
    "ddp,dense:layerwise,dense:single,dense:mgwfbp,dense:exact,"
    "micro,micro:sparse_exact,cltk,topk,oktopk,torch_fp16,torch_powersgd"
)
TICKS = [digit * 10.0**power for power in range(-4, 4) for digit in (1, 2, 5)]
FRAME = 1514 / 1448  # bytes on the wire for those of a full segment: Ethernet, IP and TCP headers with time stamps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument(
        "--rates", type=comma_list(str), default="100mbit,1gbit", metavar="A,B", help="of the links (%(default)s)"
    )
    parser.add_argument("--hosts", type=whole_number(2), default=4, help="with one rank each (%(default)s)")
    parser.add_argument("--steps", type=whole_number(), default=5, help="that count, after a warm-up (%(default)s)")
    parser.add_argument("--density", type=to_density, default=0.01, help="target of the sparse methods (%(default)s)")
    parser.add_argument(
        "--methods",
        type=comma_list(str),
        default=CHOICES,
        metavar="A,B",
        help=f"names of conf/sparsifier, with :SCHEDULE where DDP shall make its buckets by one, and {DDP}, {FP16}, "
        f"{POWERSGD}: torch's own (%(default)s)",
    )
    parser.add_argument("--link-seconds", type=to_positive, default=60.0, help="to measure each rate for (%(default)s)")
    add_settings(
        parser, help="model, dataset and so on, as for train; ResNet-18 on drawn 32 x 32 images when none is given"
    )


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the table and the figure.

    Raises:
        UserError: a mistake, or a machine that can have no hosts; nothing is started then.
        RankFailure: a rank failed.
    """
    settings = NetworkSettings.of(arguments)
    with Hosts(settings.num_hosts) as hosts, RankGroup(settings.num_hosts, prefixes=hosts.prefixes()) as ranks:
        with console.status("profiling the model and the methods"):
            profiles = take_profiles(settings, ranks)
        rows = []
        for rate in settings.rates:
            hosts.shape(rate)
            with console.status(f"{rate}: measuring the link"):
                network = measure_link(settings, ranks, rate)
            for setup in settings.setups:
                with console.status(f"{rate}: {setup.name}"):
                    rows.append(_measure(settings, setup, Prediction(profiles, network), hosts, ranks, rate))
    frame = _compared(pd.DataFrame(rows))
    console.print(_table(frame, settings))
    for path in write_or_rescue(lambda out: save(_draw(frame, settings.title), frame, out / NAME), arguments.out):
        console.print(f"wrote {path}")


def _measure(
    settings: NetworkSettings, setup: Setup, prediction: Prediction, hosts: Hosts, ranks: RankGroup, rate: str
) -> Row:
    """Train some steps over the links as they are shaped now, and return what was seen."""
    plan = None
    problem = prediction.problem(setup)
    if setup.schedule and setup.schedule.is_planned:
        assert problem
        plan = setup.schedule.plan(problem)
    ranks.call(begin_training, setup.method, setup.overrides, plan)
    ranks.call(train_steps, WARMUP)
    before = hosts.counters()
    answers = ranks.call(train_steps, settings.steps)
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
        "samples_per_s": settings.num_hosts * setup.config.batch_size / statistics.fmean(slowest),
        "link_bytes": statistics.fmean(one.payload_bytes for one in sent) / settings.steps,
        "counted_bytes": statistics.fmean(statistics.fmean(answer["bytes"]) for answer in answers),
        "predicted_s": prediction.step_s(setup, compute_s=statistics.fmean(compute_s)),
        "compute_s": statistics.fmean(compute_s),
        "wire_s": FRAME * 8 * statistics.fmean(one.payload_bytes for one in sent) / settings.steps / bits_per_s(rate),
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


def _table(frame: pd.DataFrame, settings: NetworkSettings) -> Table:
    table = Table(title=f"{settings.title}; means of {settings.steps} steps")
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
