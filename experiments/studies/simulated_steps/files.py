"""Everything that a simulation writes: steps.csv, simulate.md, levels.md, and the figures with their numbers."""

from pathlib import Path

from experiments.reports.csv_files import write_csv
from experiments.reports.figure_parts import save
from experiments.reports.output import write_file
from experiments.studies.simulated_steps.figures import (
    draw_borders,
    draw_headline,
    draw_levels,
    draw_speedups,
    draw_timeline,
    draw_trees,
)
from experiments.studies.simulated_steps.method_choices import DENSE
from experiments.studies.simulated_steps.steps import EXACT
from experiments.studies.simulated_steps.study import RATES, Frames, Study
from experiments.studies.simulated_steps.tables import SETTING, level_report, report


def write(study: Study, frames: Frames, out: Path, command: str) -> list[Path]:
    """Write tables and figures; returns the paths."""
    written = [write_csv(frames["steps"], out / "steps.csv")]
    density = f"density {study.density:g}"
    for (network, algorithm), rows in frames["steps"].groupby(["network", "algorithm"], sort=False):
        shown = rows[(rows["method"] == DENSE) | (rows["schedule"] == EXACT)]
        figure = draw_speedups(shown, f"Simulated speed-up, {network}, {algorithm}, {density}")
        written += save(figure, shown, out / f"speedup-{network}-{algorithm}")
    for key, rows in frames["timeline"].groupby(SETTING[:3], sort=False) if "timeline" in frames else ():
        written += save(draw_timeline(rows), rows, out / f"timeline-{'-'.join(map(str, key))}")
    if "levels" in frames:
        for network, rows in frames["levels"].groupby("network", sort=False):
            figure = draw_levels(rows, f"One level and two, simulated, {network!s}, {density}")
            written += save(figure, rows, out / f"levels-{network!s}")
        written.append(write_file(out / "levels.md", level_report(study, frames["levels"], command)))
    if "borders" in frames:
        rows = frames["borders"]
        figure = draw_borders(rows, f"Below its line a method is faster than dense: ring, {density}", RATES)
        written += save(figure, rows, out / "borders")
    if "headline" in frames:
        heading = "Step of other schedules / step of MG-WFBP at 64 workers, beside the published"
        written += save(draw_headline(frames["headline"], heading), frames["headline"], out / "headline")
    if "trees" in frames:
        figure = draw_trees(frames["trees"], "Double trees on the link of k80_10gbe")
        written += save(figure, frames["trees"], out / "double-trees")
    return [*written, write_file(out / "simulate.md", report(study, frames, command))]
