"""Everything that a simulation writes: steps.csv, simulate.md, levels.md, and the figures with their numbers."""

from pathlib import Path

import pandas as pd

from experiments.reports.csv_files import write_csv
from experiments.reports.figure_parts import save
from experiments.reports.output import write_file
from experiments.studies.simulated_steps.gain_figures import draw_borders, draw_headline
from experiments.studies.simulated_steps.level_figures import draw_levels
from experiments.studies.simulated_steps.level_tables import level_report
from experiments.studies.simulated_steps.questions import RATES, Frames
from experiments.studies.simulated_steps.settings import Study
from experiments.studies.simulated_steps.speedup_figures import draw_speedups, draw_trees
from experiments.studies.simulated_steps.step import DENSE, EXACT
from experiments.studies.simulated_steps.tables import report


def write(study: Study, frames: Frames, out: Path, command: str) -> list[Path]:
    """Write tables and figures; returns the paths."""
    written = [write_csv(frames["steps"], out / "steps.csv")]
    for (network, algorithm), rows in frames["steps"].groupby(["network", "algorithm"], sort=False):
        shown = rows[(rows["method"] == DENSE) | (rows["schedule"] == EXACT)]
        heading = f"Simulated speed-up, {network}, {algorithm}, density {study.density:g}"
        stem = f"speedup-{network}-{algorithm}"
        written += save(draw_speedups(shown, heading), shown, out / stem)
    if "levels" in frames:
        written += _write_levels(study, frames["levels"], out, command)
    if "borders" in frames:
        heading = f"Left of its line a method is faster than dense: ring, density {study.density:g}"
        written += save(draw_borders(frames["borders"], heading, RATES), frames["borders"], out / "borders")
    if "headline" in frames:
        heading = "Step of other schedules / step of MG-WFBP at 64 workers, beside the published"
        written += save(draw_headline(frames["headline"], heading), frames["headline"], out / "headline")
    heading = "Double trees on the link of k80_10gbe"
    written += save(draw_trees(frames["trees"], heading), frames["trees"], out / "double-trees")
    return [*written, write_file(out / "simulate.md", report(study, frames, command))]


def _write_levels(study: Study, levels: pd.DataFrame, out: Path, command: str) -> list[Path]:
    written = []
    for network, rows in levels.groupby("network", sort=False):
        heading = f"One level and two, simulated, {network}, density {study.density:g}"
        written += save(draw_levels(rows, heading), rows, out / f"levels-{network}")
    return [*written, write_file(out / "levels.md", level_report(study, levels, command))]
