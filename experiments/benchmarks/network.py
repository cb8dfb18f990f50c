"""Training over links of a known rate: hosts on this machine, methods and schedules in turn, measured and predicted.

Reports a step's time beside what no step can be faster than (the larger of its computation, measured without
communication on the same hosts, and of its bytes at the rate of the link), what the kernel counted on the links beside
what each method counts itself, and the time that the planner predicts from profiles taken on the same hosts in the
same run; and where a step goes that is longer than its bound. Needs root on Linux.

Each rate takes --link-seconds, and each method there at most about --seconds and two steps; profiles of the model and
of the methods take about a minute before. With the defaults a run ends within twelve minutes on two idle cores, one for
each host. A line tells each method as it is done. A run that is stopped writes what it has.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
from rich.console import Console

from experiments.benchmarks.network_prediction import Prediction, measure_link, take_profiles
from experiments.benchmarks.network_report import collect, command, write
from experiments.benchmarks.network_settings import NetworkSettings, Setup
from experiments.benchmarks.network_tables import compared, draw, page, print_tables
from experiments.benchmarks.network_training import DDP, FP16, POWERSGD, begin_training, train_steps
from experiments.config.command_line import add_settings, comma_list
from experiments.config.option_types import to_density, to_path, to_positive, whole_number
from experiments.ranks.group import RankGroup
from experiments.ranks.hosts import Hosts, bits_per_s, burst_s
from experiments.ranks.measures import Row

NAME = "network"
WARMUP = 4  # DDP settles its buckets after the first step, PowerSGD starts after the second
FEWEST_STEPS = 3
CHOICES = "ddp,dense:mgwfbp,micro,micro:sparse_exact,cltk,topk,oktopk,gaussiank,powersgd,torch_fp16"
FRAME = 1514 / 1448  # bytes on the wire for those of a full segment: Ethernet, IP and TCP headers with time stamps
PARTS = ("forward_s", "backward_s", "update_s", "cpu_s", "kernel_s", "select_s", "exchange_s", "rest_s", "exposed_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument(
        "--rates", type=comma_list(str), default="100mbit,1gbit", metavar="A,B", help="of the links (%(default)s)"
    )
    parser.add_argument("--hosts", type=whole_number(2), default=2, help="with one rank each (%(default)s)")
    parser.add_argument("--steps", type=whole_number(), default=12, help="that count, after a warm-up (%(default)s)")
    parser.add_argument(
        "--seconds",
        type=to_positive,
        default=20.0,
        help=f"time of each method at each rate, kept to by fewer steps, at least {FEWEST_STEPS} (%(default)s)",
    )
    parser.add_argument("--page", type=to_path, metavar="FILE", help="also write the tables as a page of Markdown")
    parser.add_argument("--density", type=to_density, default=0.01, help="target of the sparse methods (%(default)s)")
    parser.add_argument(
        "--methods",
        type=comma_list(str),
        default=CHOICES,
        metavar="A,B",
        help=f"names of conf/sparsifier, with :SCHEDULE where DDP shall make its buckets by one, and {DDP}, {FP16}, "
        f"{POWERSGD}: torch's own (%(default)s)",
    )
    parser.add_argument("--link-seconds", type=to_positive, default=8.0, help="to measure each rate for (%(default)s)")
    add_settings(
        parser, help="model, dataset and so on, as for train; ResNet-18 on drawn 32 x 32 images when none is given"
    )


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the tables and the figure; a run that is stopped writes what is finished.

    Raises:
        UserError: a mistake, or a machine that can have no hosts; nothing is started then.
        RankFailure: a rank failed.
    """
    settings = NetworkSettings.of(arguments)

    def report(rows: pd.DataFrame) -> None:
        frame = compared(rows, DDP)
        print_tables(frame, settings.title, console)
        text = page(frame, settings.title, command(arguments))
        write(NAME, frame, draw(frame, settings.title), text, arguments, console)

    collect(_measured(settings, console), arguments, report)


def _measured(settings: NetworkSettings, console: Console) -> Iterator[Row]:
    """Yield the row of each method at each rate, and print a line for it."""
    started = time.monotonic()
    with Hosts(settings.num_hosts) as hosts, RankGroup(settings.num_hosts, prefixes=hosts.prefixes()) as ranks:
        console.print("profiling the model and the methods")
        profiles = take_profiles(settings, ranks)
        for rate in settings.rates:
            hosts.shape(rate)
            console.print(f"{time.monotonic() - started:.0f} s: {rate}: measuring the link")
            prediction = Prediction(profiles, measure_link(settings, ranks, rate), ahead_s=burst_s(rate))
            for setup in settings.setups:
                row = _measure(settings, setup, prediction, hosts, ranks, rate)
                yield row
                console.print(
                    f"{time.monotonic() - started:.0f} s: {rate}: {setup.title}: {row['step_s']:.4g} s a step, "
                    f"{row['predicted_s']:.4g} s predicted"
                )


def _measure(
    settings: NetworkSettings, setup: Setup, prediction: Prediction, hosts: Hosts, ranks: RankGroup, rate: str
) -> Row:
    """Train some steps over the links as they are shaped now, and return what was seen."""
    plan = None
    problem = prediction.problem(setup)
    if setup.schedule and setup.schedule.is_planned:
        assert problem
        plan = setup.schedule.plan(problem)
    started = time.monotonic()
    ranks.call(begin_training, setup.method, setup.overrides, plan)
    warm = ranks.call(train_steps, WARMUP)
    pair_s = sum(max(answer[kind][-1]["step_s"] for answer in warm) for kind in ("steps", "compute"))
    affordable = int((settings.seconds - (time.monotonic() - started)) / pair_s)
    num_steps = max(FEWEST_STEPS, min(settings.steps, affordable))
    before = hosts.counters()
    answers = ranks.call(train_steps, num_steps)
    sent = [now - then for now, then in zip(hosts.counters(), before, strict=True)]
    slowest, compute_s = (_slowest([answer[kind] for answer in answers]) for kind in ("steps", "compute"))
    link_bytes = statistics.fmean(one.payload_bytes for one in sent) / num_steps
    return {
        "rate": rate,
        "method": setup.name,
        "title": setup.title,
        "num_steps": num_steps,
        "step_s": statistics.median(slowest),
        "least_s": min(slowest),
        "most_s": max(slowest),
        "samples_per_s": settings.num_hosts * setup.config.batch_size / statistics.median(slowest),
        "link_bytes": link_bytes,
        "counted_bytes": statistics.fmean(statistics.fmean(answer["bytes"]) for answer in answers),
        **prediction.step(setup, compute_s=statistics.median(compute_s)),
        "compute_s": statistics.median(compute_s),
        "wire_s": FRAME * 8 * link_bytes / bits_per_s(rate),
        **_parts("", [answer["steps"] for answer in answers]),
        **_parts("alone_", [answer["compute"] for answer in answers]),
    }


def _slowest(steps: Sequence[Sequence[dict[str, float]]]) -> list[float]:
    """Return the seconds of each step on its slowest rank."""
    return [max(parts["step_s"] for parts in together) for together in zip(*steps, strict=True)]


def _parts(prefix: str, steps: Sequence[Sequence[dict[str, float]]]) -> dict[str, Any]:
    """Return the seconds of each part that is known, as the median over steps and ranks; of the kernel's the mean."""
    taken = [parts for of_rank in steps for parts in of_rank]
    known = [part for part in PARTS if part in taken[0]]
    middle = {part: statistics.fmean if part == "kernel_s" else statistics.median for part in known}
    return {prefix + part: middle[part]([parts[part] for parts in taken]) for part in known}
