"""Collect the rows of a benchmark into a Markdown table, on the screen and in a file."""

import argparse
from collections.abc import Callable, Iterable, Sequence

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from experiments.tools.ranks.measures import Row
from experiments.tools.shared import markdown
from experiments.tools.shared.drawings import write_files
from experiments.tools.shared.report_opening import opening

Column = markdown.Column
Columns = markdown.Columns
table = markdown.table_of


def slowest_of(ranks: Sequence[Sequence[Row]]) -> list[Row]:
    """Return for each common step the largest value over ranks, per key."""
    return [{key: max(row[key] for row in together) for key in together[0]} for together in zip(*ranks, strict=True)]


def middle_half(values: list[float]) -> str:
    """Return the first and third quartile as text."""
    first, third = pd.Series(values).quantile([0.25, 0.75])
    return f"{first:.2f}-{third:.2f}"


def report_rows(rows: Iterable[Row], report: Callable[[pd.DataFrame], None]) -> None:
    """Report all rows; if the command is stopped or a rank fails, the finished ones."""
    found: list[Row] = []
    try:
        for row in rows:
            found.append(row)
    finally:
        if found:
            report(pd.DataFrame(found))


def write(
    frame: pd.DataFrame,
    title: str,
    blocks: Iterable[str],
    arguments: argparse.Namespace,
    console: Console,
    figure: Figure | None = None,
) -> None:
    """Print a page, and write it with its numbers and figure as NAME.md, NAME.csv and so on into ``--out``.

    Args:
        blocks: paragraphs and tables below title, command and machine.
        arguments: with the benchmark's name, command line and ``out``.
    """
    name, num_ranks = arguments.benchmark, getattr(arguments, "nproc", 1)
    head = opening(title, "experiments.bench", arguments.words, num_ranks).strip()
    page = "\n\n".join([head, *blocks]) + "\n"
    console.print(page, highlight=False, markup=False, soft_wrap=True)
    write_files([(name, page), (name, (figure, frame) if figure else frame)], arguments.out)
