"""Everything that a simulation writes: steps.csv, simulate.md, levels.md, and the figures with their numbers."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.reports.csv_files import write_csv
from experiments.reports.figure_parts import save
from experiments.reports.output import write_file
from experiments.studies.simulated_steps import figures
from experiments.studies.simulated_steps.method_choices import DENSE
from experiments.studies.simulated_steps.steps import EXACT
from experiments.studies.simulated_steps.study import RATES, Frames, Study
from experiments.studies.simulated_steps.tables import SETTING, level_report, report


def write(study: Study, frames: Frames, out: Path, command: str) -> list[Path]:
    """Write tables and figures; returns the paths."""
    written = [write_csv(frames["steps"], out / "steps.csv")]
    for stem, figure, rows in _figures(frames, f"density {study.density:g}"):
        written += save(figure, rows, out / stem)
    if "levels" in frames:
        written.append(write_file(out / "levels.md", level_report(study, frames["levels"], command)))
    return [*written, write_file(out / "simulate.md", report(study, frames, command))]


def _figures(frames: Frames, density: str) -> Iterator[tuple[str, Figure, pd.DataFrame]]:
    """Yield the name of each figure, the figure, and its numbers."""
    for (network, algorithm), rows in frames["steps"].groupby(["network", "algorithm"], sort=False):
        shown = rows[(rows["method"] == DENSE) | (rows["schedule"] == EXACT)]
        title = f"Simulated speed-up, {network}, {algorithm}, {density}"
        yield f"speedup-{network}-{algorithm}", figures.draw_speedups(shown, title), shown
    for key, rows in frames["timeline"].groupby(SETTING[:3], sort=False) if "timeline" in frames else ():
        yield f"timeline-{'-'.join(map(str, key))}", figures.draw_timeline(rows), rows
    for network, rows in frames["levels"].groupby("network", sort=False) if "levels" in frames else ():
        title = f"One level and two, simulated, {network!s}, {density}"
        yield f"levels-{network!s}", figures.draw_levels(rows, title), rows
    if "borders" in frames:
        rows = frames["borders"]
        title = f"Below its line a method is faster than dense: ring, {density}"
        yield "borders", figures.draw_borders(rows, title, RATES), rows
    if "headline" in frames:
        rows = frames["headline"]
        title = "Step of other schedules / step of MG-WFBP at 64 workers, beside the published"
        yield "headline", figures.draw_headline(rows, title), rows
    if "trees" in frames:
        rows = frames["trees"]
        yield "double-trees", figures.draw_trees(rows, "Double trees on the link of k80_10gbe"), rows
