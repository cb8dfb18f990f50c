"""Everything that a comparison writes: compare.csv, compare.md, and the figures with their numbers."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

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
    if not done.rows:
        return _selection_figure(done, settings, out)
    numbers = ordered_rows(done.rows)
    sizes = {int(n) for n in numbers["world_size"]}  # fewer than were asked for, after Ctrl-C
    world_size = settings.figure_world_size if settings.figure_world_size in sizes else max(sizes)
    written = [
        write_csv(numbers, out / "compare.csv"),
        write_file(out / "compare.md", report(opening, done, numbers, world_size, settings)),
    ]
    for name, figure, drawn in _figures(numbers, done, world_size, settings):
        written += save(figure, drawn, out / name)
    return [*written, *_selection_figure(done, settings, out)]


def _figures(
    numbers: pd.DataFrame, done: Comparison, world_size: int, settings: ComparisonSettings
) -> Iterator[tuple[str, Figure, pd.DataFrame]]:
    """Yield the name of each figure that the rows allow, itself, and the numbers that it draws."""
    workers, title = f"{world_size} workers", f"density {settings.density:g}"
    key, sparse = ["method", "stream", "world_size"], sparse_rows(numbers)  # others have no density to draw
    steps = pd.DataFrame(done.steps)
    steps = steps[(steps["world_size"] == world_size) & steps["method"].isin(sparse["method"])]
    if len(steps):
        drawn = steps[[*key, "step", "target_density", "density", "build_up"]]
        yield "density", draw_streams(drawn, DENSITY_STEPS, f"Density over steps, {workers}, {title}"), drawn
        if sparse["world_size"].nunique() > 1:
            drawn = sparse[[*key, "build_up"]]
            yield "build-up", draw_streams(drawn, BUILD_UP, f"Build-up over workers, {title}"), drawn
            if len(sent := volumes(sparse)):
                yield "volume", draw_streams(sent, VOLUME, f"Volume over workers, {title}"), sent
    alike = numbers[numbers["world_size"] == world_size]
    for stream, rows in alike[alike["bytes_share"] > 0].groupby("stream", sort=False):  # one worker sends nothing
        drawn = alike.loc[alike["stream"] == stream, [*key, "bytes_share", "step_error", "cumulative_error"]]
        yield (
            f"front-{stream}",
            draw_front(rows, f"Error and bytes on {TITLES[str(stream)]} gradients, {workers}, {title}"),
            drawn,
        )
    if done.tradeoffs:
        drawn, first = tradeoff_numbers(alike, done), done.tradeoffs[0]
        about = f"Error and compression on {TITLES[first['stream']]} gradients, {first['world_size']} workers"
        yield "tradeoff", draw_tradeoff(drawn, about), drawn


def _selection_figure(done: Comparison, settings: ComparisonSettings, out: Path) -> list[Path]:
    times = done.timed
    selecting = times[times["select_s"] > 0]
    if selecting["method"].isin([TORCH_TOPK, ONE_READ]).all() or selecting["numel"].nunique() < 2:
        return []
    figure = draw_selection_times(selecting, f"Selection on one rank, density {settings.density:g}")
    return save(figure, times, out / "selection", notes=wide_spread(times))
