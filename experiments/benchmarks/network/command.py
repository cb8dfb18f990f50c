"""Training over links of a known rate: hosts on this machine, methods and schedules in turn, measured and predicted.

Reports a step's time beside what no step can be faster than (the larger of its computation, measured without
communication on the same hosts, and of its bytes at the rate of the link), what the kernel counted on the links beside
what each method counts itself, and the time that is predicted from profiles taken on the same hosts in the same run.
Needs root on Linux.

Each rate takes --link-seconds, and each method there at most about --seconds and two steps; profiles of the model and
of the methods take about a minute before. With the defaults a run ends within twelve minutes on two idle cores, one for
each host. A line tells each method as it is done. A run that is stopped writes what it has.
"""

import argparse
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd
from rich.console import Console

import micro
from experiments.benchmarks.network import training
from experiments.benchmarks.network.links import (
    WARMUP,
    Links,
    add_link_options,
    check_words,
    linked_hosts,
    report,
)
from experiments.benchmarks.network.page import blocks, compared
from experiments.benchmarks.network.prediction import (
    Prediction,
    measure_link,
    profile_methods,
    profile_model,
)
from experiments.benchmarks.network.training import DDP, FP16, config_of
from experiments.config.builders import build_reducer
from experiments.config.errors import UserError, suggestion
from experiments.config.option_types import comma_list, to_density, to_positive, whole_number
from experiments.config.schema import TrainConfig
from experiments.ranks.hosts import bits_per_s, burst_s
from experiments.ranks.measures import Row
from experiments.reports.names import label
from experiments.reports.times import FRAME
from micro.planning.schedules.base import Schedule

NAME = "network"
FEWEST_STEPS = 3
CHOICES = "ddp,dense:mgwfbp,micro,micro:sparse_exact,cltk,topk,oktopk,gaussiank,powersgd,torch_fp16"
OF_TORCH = {DDP: "DDP", FP16: "DDP's fp16 hook"}
DEFAULTS = [
    "model=resnet18",
    "dataset=synthetic",
    "dataset.settings={num_samples: 512, image_size: 32, channels: 3, num_classes: 10}",
    "batch_size=16",
]
SETTLED = ("sparsifier", "schedule", "cluster", "output", "density")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    settings = "model, dataset and so on, as for train; ResNet-18 on drawn 32 x 32 images when none is given"
    add_link_options(parser, hosts=2, settings=settings)
    add = parser.add_argument
    add("--steps", type=whole_number(), default=12, help="that count, after a warm-up (%(default)s)")
    add(
        "--seconds",
        type=to_positive,
        default=20.0,
        help=f"time of each method at each rate, kept to by fewer steps, at least {FEWEST_STEPS} (%(default)s)",
    )
    add("--density", type=to_density, default=0.01, help="target of the sparse methods (%(default)s)")
    add(
        "--methods",
        type=comma_list(str),
        default=CHOICES,
        metavar="A,B",
        help=f"names of conf/sparsifier, with :SCHEDULE where DDP shall make its buckets by one, and {DDP}, {FP16}: "
        "torch's own (%(default)s)",
    )
    add("--link-seconds", type=to_positive, default=8.0, help="to measure each rate for (%(default)s)")


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to train.

    Attributes:
        method: one of torch's own, or a name of conf/sparsifier.
        schedule: that makes its buckets; None where the method brings its own.
        config, overrides: of the training, as the ranks have it.
    """

    name: str
    method: str
    schedule: Schedule | None
    config: TrainConfig
    overrides: list[str]

    @property
    def title(self) -> str:
        """How it is called in tables and figures."""
        base = OF_TORCH.get(self.method) or label(self.method)
        return f"{base}, {self.schedule.name}" if self.schedule else base

    @property
    def reducer(self) -> micro.Reducer:
        """What reduces the gradients; dense stands for torch's own."""
        return build_reducer(self.config)


def setups_of(arguments: argparse.Namespace) -> list[Setup]:
    """Return the ways to train. Raises: UserError: a mistake."""
    check_words(arguments, SETTLED, "--methods and --density")
    if arguments.link_seconds < 1:
        raise UserError(f"--link-seconds must be at least 1, got {arguments.link_seconds:g}")
    words = [*(arguments.overrides or DEFAULTS), f"density={arguments.density!r}"]
    return [_setup(word, words, arguments.hosts) for word in dict.fromkeys(arguments.methods)]


def _setup(word: str, overrides: list[str], num_hosts: int) -> Setup:
    method, _, wanted = word.partition(":")
    if wanted and method in OF_TORCH:
        raise UserError(f"{method} makes its own buckets, got '{word}': leave :{wanted} out")
    schedule = _schedule(wanted) if wanted else None
    words = [*overrides, f"schedule={wanted}"] if schedule and not schedule.is_planned else overrides
    return Setup(word, method, schedule, config_of(method, words, num_hosts), words)


def _schedule(name: str) -> Schedule:
    runnable = [name for name in micro.known(Schedule) if micro.build(Schedule, name).runs]
    if name not in runnable:
        raise UserError(f"a schedule must be one of {', '.join(runnable)}, got '{name}'{suggestion(name, runnable)}")
    return micro.build(Schedule, name)


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the tables and the figure; a run that is stopped writes what is finished.

    Raises:
        UserError: a mistake, or a machine that can have no hosts; nothing is started then.
        RankFailure: a rank failed.
    """
    setups = setups_of(arguments)
    config = setups[0].config
    where = f"batch {config.batch_size} on each of {arguments.hosts} hosts"
    title = f"{config.model.name} on {config.dataset.name}, {where}, density {arguments.density:g}"
    rows = _measured(arguments, setups, console)
    report(rows, "Training over links of a known rate", title, _page, arguments, console)


def _page(rows: pd.DataFrame, title: str) -> tuple[pd.DataFrame, Iterable[str]]:
    frame = compared(rows, DDP)
    return frame, blocks(frame, title)


def _measured(arguments: argparse.Namespace, setups: Sequence[Setup], console: Console) -> Iterator[Row]:
    """Yield the row of each method at each rate, and print a line for it."""
    sparse = [s.method for s in setups if s.method not in OF_TORCH and not s.config.sparsifier.is_dense]
    with linked_hosts(arguments.hosts, console) as links:
        links.say("profiling the model and the methods")
        trace = profile_model(links.ranks, arguments.overrides or DEFAULTS)
        select = profile_methods(links.ranks, list(dict.fromkeys(sparse)), trace.numel, arguments.density)
        for rate in arguments.rates:
            links.hosts.shape(rate)
            links.say(f"{rate}: measuring the link")
            link = measure_link(links.ranks, rate, arguments.link_seconds)
            prediction = Prediction(trace, select, link, ahead_s=burst_s(rate))
            for setup in setups:
                row = _measure(setup, prediction, links, rate, arguments)
                yield row
                seconds = f"{row['step_s']:.4g} s a step, {row['predicted_s']:.4g} s predicted"
                links.say(f"{rate}: {setup.title}: {seconds}")


def _measure(setup: Setup, prediction: Prediction, links: Links, rate: str, arguments: argparse.Namespace) -> Row:
    """Train some steps over the links as they are shaped now, and return what was seen."""
    schedule, plan = setup.schedule, None
    if schedule and schedule.is_planned:
        plan = prediction.plan(setup.method, setup.reducer, schedule)
    started = time.monotonic()
    links.ranks.call(training.begin, setup.method, setup.overrides, plan)
    warm = links.ranks.call(training.take, WARMUP)
    pair_s = sum(max(answer[kind][-1] for answer in warm) for kind in ("steps", "compute"))
    affordable = int((arguments.seconds - (time.monotonic() - started)) / pair_s)
    num_steps = max(FEWEST_STEPS, min(arguments.steps, affordable))
    answers, sent = links.counted(training.take, num_steps)
    link_bytes = sent / num_steps
    step_s, compute_s = (_slowest([answer[kind] for answer in answers]) for kind in ("steps", "compute"))
    alone_s = statistics.median(compute_s)
    is_hook = setup.method == FP16
    predicted_s = math.nan if is_hook else prediction.step_s(setup.method, setup.reducer, schedule, alone_s)
    return {
        "rate": rate,
        "method": setup.name,
        "title": setup.title,
        "num_steps": num_steps,
        "step_s": statistics.median(step_s),
        "least_s": min(step_s),
        "most_s": max(step_s),
        "samples_per_s": arguments.hosts * setup.config.batch_size / statistics.median(step_s),
        "link_bytes": link_bytes,
        "counted_bytes": statistics.fmean(statistics.fmean(answer["bytes"]) for answer in answers),
        "predicted_s": predicted_s,
        "compute_s": alone_s,
        "wire_s": FRAME * 8 * link_bytes / bits_per_s(rate),
    }


def _slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return the seconds of each step on its slowest rank."""
    return [max(together) for together in zip(*ranks, strict=True)]
