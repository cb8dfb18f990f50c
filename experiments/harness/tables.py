"""One row per experiment: what it reached, what it sent, where its time went."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.harness.frames import EXPERIMENT, STAGES, Frames, load
from experiments.harness.plotting import human, in_order, label

WARM_UP_STEPS = 10  # caches, allocators and connections settle; left out of times where a run is long enough
ROW = [*EXPERIMENT, "variant"]
NOTE = "accuracy (± half the range of n seeds), density asked and measured, bytes sent per step and worker"
Column = tuple[str, Callable[[pd.Series], str]]


def summary(root: Path | str) -> pd.DataFrame:
    """Summarise every finished run under ``root``; columns as in ``summarise``. Raises: UserError when none is."""
    return summarise(load(root))


def summarise(frames: Frames) -> pd.DataFrame:
    """One row per model, dataset, world_size, density, sparsifier and variant; numbers are means over seeds.

    Columns: num_seeds; accuracy of the last epoch (fraction) and accuracy_half_range, half the distance of the
    best and the worst seed; means over all applied steps of density, target_density, density_error, build_up,
    imbalance; bytes_sent per step and worker; compute_ms, select_ms, exchange_ms, rest_ms (medians over steps)
    and total_ms, their sum.
    """
    parts = [frames.runs.set_index("run")[ROW], _accuracy(frames), _traffic(frames), stage_times(frames.steps)]
    per_run = pd.concat(parts, axis=1)
    groups = per_run.groupby(ROW)
    table = groups.mean(numeric_only=True)
    table.insert(0, "num_seeds", groups.size())
    spread = groups["accuracy"].max() - groups["accuracy"].min()
    table.insert(2, "accuracy_half_range", spread / 2)
    rows = table.reset_index()
    order = {name: place for place, name in enumerate(in_order(rows["sparsifier"]))}
    rows = rows.assign(place=rows["sparsifier"].map(order), sparse=-rows["density"])  # dense, the baseline, first
    keys = [*EXPERIMENT[:3], "sparse", "place", "variant"]
    return rows.sort_values(keys, ignore_index=True).drop(columns=["place", "sparse"])


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


def _accuracy(frames: Frames) -> pd.DataFrame:
    return frames.epochs.groupby("run")[["accuracy"]].last()


def _traffic(frames: Frames) -> pd.DataFrame:
    measured = ["density", "target_density", "density_error", "build_up", "imbalance"]
    steps = frames.steps
    means = steps[~steps["skipped"]].groupby("run")[measured].mean().rename(columns={"density": "measured_density"})
    return means.assign(bytes_sent=steps.groupby("run")["bytes_sent"].mean())


def print_summary(root: Path | str, console: Console) -> None:
    """Print the summary of the finished runs under ``root``. Raises: UserError when there is none."""
    print_tables(summary(root), console)


def print_tables(table: pd.DataFrame, console: Console) -> None:
    """Print a frame of ``summarise``: per model, dataset and world size two tables of at most 80 characters."""
    for (model, dataset, world_size), rows in table.groupby(EXPERIMENT[:3]):
        title = f"{human(str(model))} on {human(str(dataset))}, {world_size} workers"
        console.print(_rich_table(f"{title}: {NOTE}", QUALITY, rows))
        console.print(_rich_table(f"{title}: ms per step, medians", TIMES, rows))


def markdown(table: pd.DataFrame) -> str:
    """Write a frame of ``summarise`` as one Markdown table per model, dataset and world size."""
    blocks = []
    for (model, dataset, world_size), rows in table.groupby(EXPERIMENT[:3]):
        columns = [*QUALITY, *((f"{name} ms", show) for name, show in TIMES[2:])]
        lines = [" | ".join(name for name, _ in columns), " | ".join("---" for _ in columns)]
        lines += [" | ".join(show(row) for _, show in columns) for _, row in rows.iterrows()]
        heading = f"## {human(str(model))} on {human(str(dataset))}, {world_size} workers"
        blocks.append("\n".join([heading, "", f"{NOTE}; ms per step, medians", "", *(f"| {line} |" for line in lines)]))
    return "\n\n".join(blocks) + "\n"


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


def _accuracy_text(row: pd.Series) -> str:
    spread = f" ± {100 * row['accuracy_half_range']:.2f}" if row["num_seeds"] > 1 else ""
    return f"{100 * row['accuracy']:.2f}{spread}"


def _unless_dense(text: Callable[[pd.Series], str]) -> Callable[[pd.Series], str]:
    """A dense run has no target, so nothing that is measured against one."""
    return lambda row: "-" if row["sparsifier"] == "dense" else text(row)


def _milliseconds(column: str) -> Callable[[pd.Series], str]:
    return lambda row: f"{row[column]:.3g}"


QUALITY: list[Column] = [
    ("method", lambda row: label(row["sparsifier"], row["variant"])),
    ("n", lambda row: f"{row['num_seeds']}"),
    ("accuracy %", _accuracy_text),
    ("asked", _unless_dense(lambda row: f"{row['target_density']:.3g}")),
    ("measured", _unless_dense(lambda row: f"{row['measured_density']:.3g}")),
    ("error %", _unless_dense(lambda row: f"{100 * row['density_error']:.3g}")),
    ("build-up", _unless_dense(lambda row: f"{row['build_up']:.3g}")),
    ("sent", lambda row: human_bytes(row["bytes_sent"])),
]
TIMES: list[Column] = [
    QUALITY[0],
    ("density", _unless_dense(lambda row: f"{row['density']:g}")),
    *((stage, _milliseconds(f"{stage}_ms")) for stage in STAGES),
    ("total", _milliseconds("total_ms")),
]
