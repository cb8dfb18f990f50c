"""What the benchmarks of links share: rows are collected until the end or a stop, then printed and written."""

import argparse
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from experiments.ranks.measures import Row
from experiments.reports.figure_parts import save
from experiments.reports.output import check_folder, write_file, write_or_rescue


def collect(measured: Iterable[Row], arguments: argparse.Namespace, report: Callable[[pd.DataFrame], None]) -> None:
    """Take all rows and report them; where this process is stopped or a rank fails, those that are finished.

    Args:
        arguments: With ``page``, the file of the page or None.

    Raises:
        UserError: The page's folder cannot be written to; nothing is measured then.
    """
    if arguments.page is not None:
        check_folder(arguments.page.parent, "--page")
    rows: list[Row] = []
    try:
        for row in measured:
            rows.append(row)
    finally:
        if rows:
            report(pd.DataFrame(rows))


def write(
    name: str, frame: pd.DataFrame, figure: Figure, page: str, arguments: argparse.Namespace, console: Console
) -> None:
    """Write the figure with its numbers to ``arguments.out``, the page where one is asked for, and print the paths.

    Args:
        page: Its text.
    """
    paths = write_or_rescue(lambda out: save(figure, frame, out / name), arguments.out)
    if arguments.page is not None:
        paths.append(write_file(Path(arguments.page), page))
    for path in paths:
        console.print(f"wrote {path}")


def command(arguments: argparse.Namespace) -> str:
    """Return the command of this run."""
    return f"python -m experiments.bench {shlex.join(arguments.words)}"
