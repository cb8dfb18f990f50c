"""What the benchmarks on links share: options, hosts with one rank each, bytes on the links, and the report."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
from rich.console import Console

from experiments.benchmarks import tables
from experiments.benchmarks.network.page import draw
from experiments.config.command_line import add_settings
from experiments.config.errors import UserError
from experiments.config.option_types import comma_list, whole_number
from experiments.ranks.group import RankGroup
from experiments.ranks.hosts import Hosts, bits_per_s
from experiments.ranks.measures import Row

WARMUP = 4  # DDP settles its buckets after the first step


def add_link_options(parser: argparse.ArgumentParser, *, hosts: int, settings: str) -> None:
    """Declare the options of both benchmarks; ``settings`` says what the words KEY=VALUE are of."""
    rates = comma_list(str)
    parser.add_argument(
        "--rates", type=rates, default="100mbit,1gbit", metavar="A,B", help="of the links (%(default)s)"
    )
    parser.add_argument("--hosts", type=whole_number(2), default=hosts, help="with one rank each (%(default)s)")
    add_settings(parser, help=settings)


def check_words(arguments: argparse.Namespace, settled: Sequence[str], see: str) -> None:
    """Refuse what is no rate, and settings that the benchmark sets itself.

    Raises:
        UserError: such a word; ``see`` names the options in its place.
    """
    for rate in arguments.rates:
        bits_per_s(rate)
    for word in arguments.overrides:
        if word.split("=")[0].split(".")[0] in settled:
            raise UserError(f"'{word}': this benchmark sets it itself; see {see}")


class Links:
    """Hosts with one rank each, whose links have a rate.

    Attributes:
        hosts, ranks: for what is not here.
    """

    def __init__(self, hosts: Hosts, ranks: RankGroup, console: Console) -> None:
        self.hosts, self.ranks, self._console = hosts, ranks, console
        self._started = time.monotonic()

    def counted(self, function: Callable[..., Any], *arguments: Any) -> tuple[list[Any], float]:
        """Call a function on all ranks; return their answers, and the mean payload bytes that a host has sent."""
        before = self.hosts.counters()
        answers = self.ranks.call(function, *arguments)
        sent = [now - then for now, then in zip(self.hosts.counters(), before, strict=True)]
        return answers, statistics.fmean(one.payload_bytes for one in sent)

    def say(self, line: str) -> None:
        """Print a line with the seconds since the start."""
        self._console.print(f"{time.monotonic() - self._started:.0f} s: {line}")


@contextmanager
def linked_hosts(number: int, console: Console) -> Iterator[Links]:
    """Yield so many hosts with a rank each. Raises: UserError: this machine can have no hosts."""
    with Hosts(number) as hosts, RankGroup(number, prefixes=hosts.prefixes()) as ranks:
        yield Links(hosts, ranks, console)


def report(
    rows: Iterable[Row],
    heading: str,
    title: str,
    page: Callable[[pd.DataFrame, str], tuple[pd.DataFrame, Iterable[str]]],
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    """Take all rows, print and write the tables and the figure; a run that is stopped writes what is finished.

    Args:
        page: makes of the rows, and of the title, the numbers that are written, and the blocks of the page.
    """

    def write(found: pd.DataFrame) -> None:
        frame, blocks = page(found, title)
        tables.write(frame, heading, blocks, arguments, console, draw(frame, title))

    tables.report_rows(rows, write)
