"""What benchmarks share: rows that are measured one by one become a table in Markdown, on the screen and in a file."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from experiments.ranks.measures import Row
from experiments.reports import markdown
from experiments.reports.csv_files import write_csv
from experiments.reports.figure_parts import save
from experiments.reports.output import write_file, write_or_rescue
from experiments.reports.report_opening import opening


class Column(NamedTuple):
    """A column of a table: the key of its values, how they are written, and what they are multiplied by before."""

    key: str
    form: str = "{}"
    factor: float = 1

    def cell(self, value: Any) -> str:
        """Return a value in words; - where it is not known."""
        return value if isinstance(value, str) else "-" if pd.isna(value) else self.form.format(self.factor * value)


Columns = Mapping[str, Column]


def table(frame: pd.DataFrame, columns: Columns) -> str:
    """Return a table as Markdown, a row for each of the frame's."""
    frame = frame.reindex(columns=[column.key for column in columns.values()])
    rows = frame.itertuples(index=False, name=None)
    cells = [[column.cell(value) for column, value in zip(columns.values(), row, strict=True)] for row in rows]
    return markdown.table(list(columns), cells)


def slowest_of(ranks: Sequence[Sequence[Row]]) -> list[Row]:
    """Return for each step, which all ranks took together, the largest of all ranks, key by key."""
    return [{key: max(row[key] for row in together) for key in together[0]} for together in zip(*ranks, strict=True)]


def middle_half(values: list[float]) -> str:
    """Return the first and the third quartile in words."""
    first, third = pd.Series(values).quantile([0.25, 0.75])
    return f"{first:.2f}-{third:.2f}"


def report_rows(rows: Iterable[Row], report: Callable[[pd.DataFrame], None]) -> None:
    """Take all rows and report them; where the command is stopped or a rank fails, those that are finished."""
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
    """Print a page, and write it with its numbers and its figure as NAME.md, NAME.csv and so on into ``--out``.

    Args:
        blocks: paragraphs and tables below the title, the command and the machine.
        arguments: with the benchmark's name, its words and ``out``.
    """
    name, num_ranks = arguments.benchmark, getattr(arguments, "nproc", 1)
    head = opening(title, "experiments.bench", arguments.words, num_ranks).strip()
    page = "\n\n".join([head, *blocks]) + "\n"
    console.print(page, highlight=False, markup=False, soft_wrap=True)

    def files(out: Path) -> list[Path]:
        text = write_file(out / f"{name}.md", page)
        return [text, *(save(figure, frame, out / name) if figure else [write_csv(frame, out / f"{name}.csv")])]

    for path in write_or_rescue(files, arguments.out):
        console.print(f"wrote {path}")
