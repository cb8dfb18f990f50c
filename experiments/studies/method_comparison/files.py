"""Everything that a comparison writes: compare.csv, compare.md, and the figures with their numbers."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from experiments.reports.csv_files import write_csv
from experiments.reports.figure_parts import save
from experiments.reports.output import write_file
from experiments.studies.gradient_sources import TITLES
from experiments.studies.method_comparison.figures import (
    BUILD_UP,
    DENSITY_STEPS,
    VOLUME,
    draw_front,
    draw_selection_times,
    draw_streams,
    draw_tradeoff,
)
from experiments.studies.method_comparison.measure import Comparison, ComparisonSettings
from experiments.studies.method_comparison.numbers import ordered_rows, sparse_rows, tradeoff_numbers, volumes
from experiments.studies.method_comparison.report import report
from experiments.studies.selection_times import ONE_READ, TORCH_TOPK, wide_spread


def write(done: Comparison, settings: ComparisonSettings, out: Path, opening: str) -> list[Path]:
    """Write the numbers, the report and the figures; returns their paths.

    Args:
        opening: the first lines of the report.
    """
    written = []
    if done.rows:
        numbers = ordered_rows(done.rows)
        sizes = {int(n) for n in numbers["world_size"]}  # fewer than were asked for, after Ctrl-C
        world_size = settings.figure_world_size if settings.figure_world_size in sizes else max(sizes)
        written.append(write_csv(numbers, out / "compare.csv"))
        written.append(write_file(out / "compare.md", report(opening, done, numbers, world_size, settings)))
        written += _density_figures(numbers, pd.DataFrame(done.steps), world_size, settings, out)
        alike = numbers[numbers["world_size"] == world_size]
        written += _front_figures(alike, settings, out)
        written += _tradeoff_figure(alike, done, out)
    return [*written, *_selection_figure(done, settings, out)]


def _density_figures(
    numbers: pd.DataFrame, steps: pd.DataFrame, world_size: int, settings: ComparisonSettings, out: Path
) -> Iterator[Path]:
    """Draw density over steps, build-up and volume over workers, of the methods that have a density."""
    sparse, title = sparse_rows(numbers), f"density {settings.density:g}"
    steps = steps[(steps["world_size"] == world_size) & steps["method"].isin(sparse["method"])]
    if steps.empty:
        return
    drawn = steps[["method", "stream", "world_size", "step", "target_density", "density", "build_up"]]
    figure = draw_streams(drawn, DENSITY_STEPS, f"Density over steps, {world_size} workers, {title}")
    yield from save(figure, drawn, out / "density")
    if sparse["world_size"].nunique() < 2:
        return
    figure = draw_streams(sparse, BUILD_UP, f"Build-up over workers, {title}")
    yield from save(figure, sparse[["method", "stream", "world_size", "build_up"]], out / "build-up")
    sent = volumes(sparse)
    if not sent.empty:
        yield from save(draw_streams(sent, VOLUME, f"Volume over workers, {title}"), sent, out / "volume")


def _front_figures(numbers: pd.DataFrame, settings: ComparisonSettings, out: Path) -> Iterator[Path]:
    columns = ["method", "stream", "world_size", "bytes_share", "step_error", "cumulative_error"]
    for stream, rows in numbers.groupby("stream", sort=False):
        if not (rows["bytes_share"] > 0).any():
            continue  # one worker sends nothing
        workers = f"{rows['world_size'].iloc[0]} workers"
        title = f"Error and bytes on {TITLES[str(stream)]} gradients, {workers}, density {settings.density:g}"
        yield from save(draw_front(rows, title), rows[columns], out / f"front-{stream}")


def _tradeoff_figure(numbers: pd.DataFrame, done: Comparison, out: Path) -> list[Path]:
    if not done.tradeoffs:
        return []
    drawn = tradeoff_numbers(numbers, done)
    stream, world_size = done.tradeoffs[0]["stream"], done.tradeoffs[0]["world_size"]
    title = f"Error and compression on {TITLES[stream]} gradients, {world_size} workers"
    return save(draw_tradeoff(drawn, title), drawn, out / "tradeoff")


def _selection_figure(done: Comparison, settings: ComparisonSettings, out: Path) -> list[Path]:
    times = done.timed
    selecting = times[times["select_s"] > 0]
    if selecting["method"].isin([TORCH_TOPK, ONE_READ]).all() or selecting["numel"].nunique() < 2:
        return []
    figure = draw_selection_times(selecting, f"Selection on one rank, density {settings.density:g}")
    return save(figure, times, out / "selection", notes=wide_spread(times))
