"""Write the files of a comparison: compare.csv, compare.md, and figures with their numbers."""

from collections.abc import Iterator

import pandas as pd

from experiments.tools.compare import figures
from experiments.tools.compare.measure import Comparison, ComparisonSettings
from experiments.tools.compare.numbers import ordered_rows, sparse_rows, tradeoff_numbers, volumes
from experiments.tools.compare.report import report
from experiments.tools.shared.drawings import Content
from experiments.tools.shared.gradient_sources import TITLES
from experiments.tools.shared.selection_times import ONE_READ, TORCH_TOPK

KEY = ["method", "stream", "world_size"]


def files(done: Comparison, settings: ComparisonSettings, opening: str) -> Iterator[tuple[str, Content]]:
    """Yield the name and content of each file that the rows allow; ``opening``: first lines of the report."""
    if done.rows:
        yield from _of_rows(done, settings, opening)
    selecting = done.timed[done.timed["select_s"] > 0]
    if not selecting["method"].isin([TORCH_TOPK, ONE_READ]).all() and selecting["numel"].nunique() > 1:
        title = f"Selection on one rank, density {settings.density:g}"
        yield "selection", (figures.draw_selection_times(selecting, title), done.timed)


def _of_rows(done: Comparison, settings: ComparisonSettings, opening: str) -> Iterator[tuple[str, Content]]:
    numbers = ordered_rows(pd.DataFrame(done.rows))
    sizes = {int(n) for n in numbers["world_size"]}  # fewer than requested, after Ctrl-C
    world_size = settings.figure_world_size if settings.figure_world_size in sizes else max(sizes)
    yield "compare", numbers
    yield "compare", report(opening, done, numbers, world_size, settings)
    workers, title = f"{world_size} workers", f"density {settings.density:g}"
    steps, sparse = pd.DataFrame(done.steps), sparse_rows(numbers)  # others have no density
    steps = steps[(steps["world_size"] == world_size) & steps["method"].isin(sparse["method"])]
    of_streams = [("density", figures.DENSITY_STEPS, f"Density over steps, {workers}, {title}", steps)]
    if len(steps) and sparse["world_size"].nunique() > 1:
        of_streams.append(("build-up", figures.BUILD_UP, f"Build-up over workers, {title}", sparse))
        of_streams.append(("volume", figures.VOLUME, f"Volume over workers, {title}", volumes(sparse)))
    more = {"density": ["step", "target_density", "density", "build_up"], "build-up": ["build_up"]}
    for name, kind, words, rows in of_streams:
        if len(rows):
            drawn = rows[[*KEY, *more.get(name, ["bytes_sent", "words_per_k"])]]
            yield name, (figures.draw_streams(drawn, kind, words), drawn)
    alike = numbers[numbers["world_size"] == world_size]
    for stream, rows in alike.groupby("stream", sort=False):
        if (rows["bytes_share"] > 0).any():  # one worker sends nothing
            words = f"Error and bytes on {TITLES[str(stream)]} gradients, {workers}, {title}"
            drawn = rows[[*KEY, "bytes_share", "step_error", "cumulative_error"]]
            yield f"front-{stream}", (figures.draw_front(rows, words), drawn)
    if done.tradeoffs and world_size > 1:
        drawn, first = tradeoff_numbers(alike, pd.DataFrame(done.tradeoffs)), done.tradeoffs[0]
        words = f"Error and compression on {TITLES[first['stream']]} gradients, {first['world_size']} workers"
        yield "tradeoff", (figures.draw_tradeoff(drawn, words), drawn)
