"""Summaries of runs as tables: on a terminal, in Markdown, as CSV."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.config.units import human_bytes, three_digits
from experiments.reports.csv_files import write_csv
from experiments.reports.frames import STAGES
from experiments.reports.link_times import NAMES, NOTE
from experiments.reports.markdown import table as markdown_table
from experiments.reports.measures import Metric, metric_of
from experiments.reports.names import human, label
from experiments.reports.output import write_file
from experiments.reports.run_configs import EXPERIMENT
from experiments.reports.summary import summary

Column = tuple[str, Callable[[pd.Series], str]]


def print_summary(root: Path | str, console: Console) -> None:
    """Print the summary of the finished runs under ``root``. Raises: UserError when there is none."""
    print_tables(summary(root), console)


def print_tables(table: pd.DataFrame, console: Console) -> None:
    """Print a frame of ``summarise``: per model, dataset and world size two tables of at most 80 characters."""
    for study, rows in table.groupby(EXPERIMENT[:3]):
        title = study_name(*study)
        metric = metric_of(rows["metric"])
        console.print(_rich_table(f"{title}: {_note(metric)}", _quality(metric), rows))
        console.print(_rich_table(f"{title}: ms per step, medians", _times(rows), rows))
        if _has_links(rows):
            console.print(NOTE, style="dim")


def markdown(table: pd.DataFrame, notes: Sequence[str] = ()) -> str:
    """Write a frame of ``summarise`` as one Markdown table per model, dataset and world size, notes below them."""
    blocks = []
    for study, rows in table.groupby(EXPERIMENT[:3]):
        metric = metric_of(rows["metric"])
        columns = [*_quality(metric), *((f"{name} ms", show) for name, show in _times(rows)[2:])]
        lines = [[show(row) for _, show in columns] for _, row in rows.iterrows()]
        blocks += [
            f"## {study_name(*study)}",
            f"{_note(metric)}; ms per step, medians{f'; {NOTE}' if _has_links(rows) else ''}",
            markdown_table([name for name, _ in columns], lines),
        ]
    return "\n\n".join([*blocks, *notes]) + "\n"


def write_summary(table: pd.DataFrame, out: Path, notes: Sequence[str] = ()) -> list[Path]:
    """Write a frame of ``summarise`` as summary.csv and, with notes, summary.md; returns the paths."""
    paths = [write_csv(table, out / "summary.csv"), out / "summary.md"]
    write_file(paths[-1], markdown(table, notes))
    return paths


def study_name(model: object, dataset: object, world_size: object) -> str:
    """Name what the rows of one table have in common."""
    return f"{human(str(model))} on {human(str(dataset))}, {world_size} worker{'' if world_size == 1 else 's'}"


def _rich_table(title: str, columns: list[Column], rows: pd.DataFrame) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for name, _ in columns:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for _, group in rows.groupby("density", sort=False):
        for _, row in group.iterrows():
            table.add_row(*(show(row) for _, show in columns))
        table.add_section()
    return table


def _note(metric: Metric) -> str:
    return f"{metric.name} (± half the range of n seeds), target and measured density, bytes sent per step and worker"


def _quality(metric: Metric) -> list[Column]:
    return [*NAMED, (metric.column, lambda row: _score(row, metric)), *TRAFFIC]


def _score(row: pd.Series, metric: Metric) -> str:
    if math.isnan(row[metric.key]):
        return "not finite"
    half_range = f" ± {metric.format(row[f'{metric.key}_half_range'])}" if row["num_seeds"] > 1 else ""
    return f"{metric.format(row[metric.key])}{half_range}"


def _unless_dense(text: Callable[[pd.Series], str]) -> Callable[[pd.Series], str]:
    """A dense run has no target, so nothing that is measured against one; nor has one without an applied step."""
    return lambda row: "-" if row["sparsifier"] == "dense" or math.isnan(row["measured_density"]) else text(row)


def _times(rows: pd.DataFrame) -> list[Column]:
    """Return the columns of times: those on slower links where they are known of a run."""
    links = [(name, _milliseconds(column)) for column, name in NAMES.items()] if _has_links(rows) else []
    return [*TIMES, *links]


def _has_links(rows: pd.DataFrame) -> bool:
    return bool(rows[list(NAMES)].notna().any(axis=None))


def _milliseconds(column: str) -> Callable[[pd.Series], str]:
    return lambda row: "-" if math.isnan(row[column]) else three_digits(row[column])


NAMED: list[Column] = [
    ("method", lambda row: label(row["sparsifier"], row["variant"])),
    ("n", lambda row: f"{row['num_seeds']}"),
]
TRAFFIC: list[Column] = [
    ("target", _unless_dense(lambda row: f"{row['target_density']:.3g}")),
    ("density", _unless_dense(lambda row: f"{row['measured_density']:.3g}")),
    ("error %", _unless_dense(lambda row: f"{100 * row['density_error']:.3g}")),
    ("build-up", _unless_dense(lambda row: f"{row['build_up']:.3g}")),
    ("sent", lambda row: human_bytes(row["bytes_sent"])),
]
TIMES: list[Column] = [
    NAMED[0],
    ("density", _unless_dense(lambda row: f"{row['density']:g}")),
    *((stage, _milliseconds(f"{stage}_ms")) for stage in STAGES),
    ("total", _milliseconds("total_ms")),
]
