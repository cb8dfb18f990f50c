"""One row per experiment: what it reached, what it sent, where its time went."""

import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from pandas.api.typing import DataFrameGroupBy
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.reports.frames import EXPERIMENT, STAGES, Frames, load
from experiments.reports.measures import METRICS, Metric, metric_of
from experiments.reports.names import human, in_order, label

WARM_UP_STEPS = 10  # caches, allocators and connections settle; left out of times where a run is long enough
ROW = [*EXPERIMENT, "variant"]
SPREAD = ("", "_half_range", "_min", "_max")  # columns of a measure: its key with each of these
Column = tuple[str, Callable[[pd.Series], str]]


def summary(root: Path | str) -> pd.DataFrame:
    """Summarise every finished run under ``root``; columns as in ``summarise``. Raises: UserError when none is."""
    return summarise(load(root))


def summarise(frames: Frames) -> pd.DataFrame:
    """One row per model, dataset, world_size, density, sparsifier and variant; numbers are means over seeds.

    Columns: metric, the key of the measure that stands for the row; num_seeds; for every measure of the runs, such as
    accuracy, its value after the last epoch (shares as fractions) with accuracy_half_range, half the distance of the
    best and the worst seed, accuracy_min and accuracy_max; means over all applied steps of density, target_density,
    density_error, build_up, imbalance; bytes_sent per step and worker; compute_ms, select_ms, exchange_ms, rest_ms
    (medians over steps) and total_ms, their sum. A measure of another task is NaN.
    """
    keys = measured(frames.epochs)
    ends = frames.epochs.groupby("run").tail(1).set_index("run")[["metric", *keys]]
    parts = [frames.runs.set_index("run")[ROW], ends, _traffic(frames), stage_times(frames.steps)]
    groups = pd.concat(parts, axis=1).groupby([*ROW, "metric"])
    table = spread(groups[keys]).join(groups.mean().drop(columns=keys))
    table.insert(0, "num_seeds", groups.size())
    rows = table.reset_index()
    order = {name: place for place, name in enumerate(in_order(rows["sparsifier"]))}
    rows = rows.assign(place=rows["sparsifier"].map(order), sparse=-rows["density"])  # dense, the baseline, first
    by = [*EXPERIMENT[:3], "sparse", "place", "variant"]
    return rows.sort_values(by, ignore_index=True).drop(columns=["place", "sparse"])


def measured(rows: pd.DataFrame) -> list[str]:
    """Return the keys of METRICS that rows of ``summarise``, or epochs, have values of or are named after."""
    named = set(rows["metric"])
    keys = [metric.key for metric in METRICS if metric.key in rows]
    return [key for key in keys if key in named or rows[key].notna().any()]


def of_study(rows: pd.DataFrame) -> pd.DataFrame:
    """Leave out of some rows of ``summarise`` the columns of measures that only other rows have."""
    others = {metric.key for metric in METRICS} - set(measured(rows))
    return rows.drop(columns=[f"{key}{end}" for key in others for end in SPREAD], errors="ignore")


def spread(scores: DataFrameGroupBy) -> pd.DataFrame:
    """Columns of SPREAD of each measure over the seeds of a group; NaN, not of fewer seeds, where one is not finite."""
    least, mean, most = scores.min(skipna=False), scores.mean(skipna=False), scores.max(skipna=False)
    parts = zip(SPREAD, (mean, (most - least) / 2, least, most), strict=True)
    table = pd.concat([part.add_suffix(end) for end, part in parts], axis=1)
    return table[[f"{key}{end}" for key in mean.columns for end in SPREAD]]


def stage_times(steps: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds per step of each run: the median of every stage over the steps after the warm-up, and their sum.

    Steps that were skipped do not count, nor do the first WARM_UP_STEPS (half of the steps in a very short run).
    """
    applied = steps[~steps["skipped"]]
    lengths = applied.groupby("run")["step"].transform("size")
    position = applied.groupby("run").cumcount()
    warm = applied[position >= (lengths // 2).clip(upper=WARM_UP_STEPS)]
    times = warm.groupby("run")[[f"{stage}_s" for stage in STAGES]].median().fillna(0) * 1000
    times.columns = pd.Index([f"{stage}_ms" for stage in STAGES])
    return times.assign(total_ms=times.sum(axis=1))


def _traffic(frames: Frames) -> pd.DataFrame:
    columns = ["density", "target_density", "density_error", "build_up", "imbalance"]
    steps = frames.steps
    means = steps[~steps["skipped"]].groupby("run")[columns].mean().rename(columns={"density": "measured_density"})
    return means.assign(bytes_sent=steps.groupby("run")["bytes_sent"].mean())


def print_summary(root: Path | str, console: Console) -> None:
    """Print the summary of the finished runs under ``root``. Raises: UserError when there is none."""
    print_tables(summary(root), console)


def print_tables(table: pd.DataFrame, console: Console) -> None:
    """Print a frame of ``summarise``: per model, dataset and world size two tables of at most 80 characters."""
    for study, rows in table.groupby(EXPERIMENT[:3]):
        title = study_name(*study)
        metric = metric_of(rows["metric"])
        console.print(_rich_table(f"{title}: {_note(metric)}", _quality(metric), rows))
        console.print(_rich_table(f"{title}: ms per step, medians", TIMES, rows))


def markdown(table: pd.DataFrame) -> str:
    """Write a frame of ``summarise`` as one Markdown table per model, dataset and world size."""
    blocks = []
    for study, rows in table.groupby(EXPERIMENT[:3]):
        metric = metric_of(rows["metric"])
        columns = [*_quality(metric), *((f"{name} ms", show) for name, show in TIMES[2:])]
        lines = [" | ".join(name for name, _ in columns), " | ".join("---" for _ in columns)]
        lines += [" | ".join(show(row) for _, show in columns) for _, row in rows.iterrows()]
        heading = f"## {study_name(*study)}"
        blocks.append(
            "\n".join([heading, "", f"{_note(metric)}; ms per step, medians", "", *(f"| {line} |" for line in lines)])
        )
    return "\n\n".join(blocks) + "\n"


def study_name(model: object, dataset: object, world_size: object) -> str:
    """Name what the rows of one table have in common."""
    return f"{human(str(model))} on {human(str(dataset))}, {world_size} worker{'' if world_size == 1 else 's'}"


def human_bytes(count: float) -> str:
    """Write a number of bytes in decimal units: ``1.23 MB``."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


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
    return f"{metric.name} (± half the range of n seeds), density asked and measured, bytes sent per step and worker"


def _quality(metric: Metric) -> list[Column]:
    return [*NAMED, (metric.column, lambda row: _score(row, metric)), *TRAFFIC]


def _score(row: pd.Series, metric: Metric) -> str:
    if math.isnan(row[metric.key]):
        return "not finite"
    half_range = f" ± {metric.format(row[f'{metric.key}_half_range'])}" if row["num_seeds"] > 1 else ""
    return f"{metric.format(row[metric.key])}{half_range}"


def _unless_dense(text: Callable[[pd.Series], str]) -> Callable[[pd.Series], str]:
    """A dense run has no target, so nothing that is measured against one."""
    return lambda row: "-" if row["sparsifier"] == "dense" else text(row)


def _milliseconds(column: str) -> Callable[[pd.Series], str]:
    return lambda row: f"{row[column]:.3g}"


NAMED: list[Column] = [
    ("method", lambda row: label(row["sparsifier"], row["variant"])),
    ("n", lambda row: f"{row['num_seeds']}"),
]
TRAFFIC: list[Column] = [
    ("asked", _unless_dense(lambda row: f"{row['target_density']:.3g}")),
    ("measured", _unless_dense(lambda row: f"{row['measured_density']:.3g}")),
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
