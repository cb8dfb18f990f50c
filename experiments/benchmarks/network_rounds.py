"""Local steps over links of a known rate: forms of the study of equal tokens on hosts, measured and simulated.

A form exchanges gradients at every step, adds them up over several, or exchanges differences of weights after rounds of
steps. Reports the seconds of one batch as a mean over whole rounds, so that an exchange counts once in its round; what
the kernel counted on the links beside what the method counts; and the seconds that the page on equal tokens simulates,
from the computation and the messages of the same steps. Needs root on Linux.

Each form trains at each rate for --rounds whole rounds and at least --batches batches, after some that do not count. A
line tells each form at each rate as it is done. A run that is stopped writes what it has.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
from rich.console import Console

from experiments.benchmarks.network_report import collect, command, write
from experiments.benchmarks.network_rounds_page import compared, page, print_table
from experiments.benchmarks.network_rounds_training import begin_rounds, train_rounds
from experiments.benchmarks.network_tables import draw
from experiments.benchmarks.network_ways import RoundsSettings, Way
from experiments.config.command_line import add_settings, comma_list
from experiments.config.option_types import to_path, whole_number
from experiments.ranks.group import RankGroup
from experiments.ranks.hosts import Hosts, bits_per_s
from experiments.ranks.measures import Row
from experiments.reports.link_times import exchange_s

NAME = "network_rounds"
CHOICES = (
    "dense,dense+5,dense:5,dense:30:nesterov,micro,micro:5,micro:30,topk:5,sparseloco_published:5,"
    "sparseloco_published:30,demo"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument(
        "--rates", type=comma_list(str), default="100mbit,1gbit", metavar="A,B", help="of the links (%(default)s)"
    )
    parser.add_argument("--hosts", type=whole_number(2), default=4, help="with one rank each (%(default)s)")
    parser.add_argument(
        "--ways",
        type=comma_list(str),
        default=CHOICES,
        metavar="A,B",
        help="forms of conf/sweep/gpt_equal_tokens.yaml: METHOD exchanges at every step, METHOD:H after rounds of H, "
        "METHOD:H:nesterov with such an outer optimizer, METHOD+N adds gradients up over N steps (%(default)s)",
    )
    parser.add_argument("--rounds", type=whole_number(), default=3, help="that count, at least (%(default)s)")
    parser.add_argument(
        "--batches", type=whole_number(), default=30, help="of each worker that count, at least (%(default)s)"
    )
    parser.add_argument("--page", type=to_path, metavar="FILE", help="also write the tables as a page of Markdown")
    add_settings(parser, help="further settings of every form, as for train")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the tables and the figure; a run that is stopped writes what is finished.

    Raises:
        UserError: a mistake, or a machine that can have no hosts; nothing is started then.
        RankFailure: a rank failed.
    """
    settings = RoundsSettings.of(arguments)

    def report(rows: pd.DataFrame) -> None:
        frame = compared(rows, settings.rates)
        print_table(frame, settings.title, console)
        text = page(frame, settings.title, command(arguments))
        write(NAME, frame, draw(frame, settings.title), text, arguments, console)

    collect(_measured(settings, console), arguments, report)


def _measured(settings: RoundsSettings, console: Console) -> Iterator[Row]:
    """Yield the row of each form at each rate, and print a line for it."""
    started = time.monotonic()
    with Hosts(settings.num_hosts) as hosts, RankGroup(settings.num_hosts, prefixes=hosts.prefixes()) as ranks:
        for way in settings.ways:
            hosts.shape(None)
            ranks.call(begin_rounds, way.words)
            for rate in settings.rates:
                hosts.shape(rate)
                row = _measure(settings, way, hosts, ranks, rate)
                yield row
                console.print(
                    f"{time.monotonic() - started:.0f} s: {rate}: {way.name}: {row['step_s']:.4g} s a batch, "
                    f"{row['link_bytes'] / 1e3:.4g} kB"
                )


def _measure(settings: RoundsSettings, way: Way, hosts: Hosts, ranks: RankGroup, rate: str) -> Row:
    """Train whole rounds over the links as they are shaped now; return what was seen, for each batch of a worker."""
    ranks.call(train_rounds, settings.warm_rounds(way), way.round_steps)
    before = hosts.counters()
    answers = ranks.call(train_rounds, settings.num_rounds(way), way.round_steps)
    sent = [now - then for now, then in zip(hosts.counters(), before, strict=True)]
    num_batches = settings.num_rounds(way) * way.interval
    return {
        "rate": rate,
        "way": way.name,
        "title": way.title,
        "method": way.config.sparsifier.name,
        "exchanged": way.exchanged,
        "interval": way.interval,
        "num_rounds": settings.num_rounds(way),
        **batch_seconds([answer["seconds"] for answer in answers], way.interval),
        "link_bytes": statistics.fmean(one.payload_bytes for one in sent) / num_batches,
        **of_steps([answer["steps"] for answer in answers], num_batches, way.config.accumulate, bits_per_s(rate)),
    }


def batch_seconds(rounds: Sequence[Sequence[float]], interval: int) -> dict[str, float]:
    """Return the seconds of a batch: the mean over rounds, the least and the most, each of its slowest rank.

    Args:
        rounds: for each rank the seconds of its rounds, which it took in a row.
    """
    slowest = [max(together) / interval for together in zip(*rounds, strict=True)]
    mean = max(sum(own) for own in rounds) / (len(slowest) * interval)
    return {"step_s": mean, "least_s": min(slowest), "most_s": max(slowest)}


def of_steps(
    steps: Sequence[Sequence[dict[str, Any]]], num_batches: int, batches: int, rate: float
) -> dict[str, float]:
    """Return for a batch what ranks computed and counted, and the seconds of rank 0's messages on a simulated link.

    Args:
        steps: for each rank the records of its steps.
        batches: of a worker in each step.
        rate: bits per second.
    """
    frames = [pd.DataFrame(own) for own in steps]
    calls = pd.to_numeric(frames[0]["num_collectives"]).fillna(0)
    on_link = exchange_s(frames[0]["bytes_sent"], calls, len(frames), rate)
    return {
        "compute_s": statistics.fmean(own["compute_s"].median() for own in frames) / batches,
        "counted_bytes": statistics.fmean(own["bytes_sent"].sum() for own in frames) / num_batches,
        "simulated_exchange_s": on_link.sum() / num_batches,
    }
