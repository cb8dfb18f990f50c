"""Write the files of a simulation: steps.csv, simulate.md, levels.md, and figures with their numbers."""

from collections.abc import Iterator

import pandas as pd

from experiments.planning.traces import Trace
from experiments.reports.names import human
from experiments.tools.shared.drawings import Content
from experiments.tools.simulate import figures
from experiments.tools.simulate.method_choices import DENSE
from experiments.tools.simulate.setup import RATES, Frames, Setup
from experiments.tools.simulate.steps import EXACT
from experiments.tools.simulate.tables import SETTING, level_report, nearest_gains, report


def files(setup: Setup, frames: Frames, command: str) -> Iterator[tuple[str, Content]]:
    """Yield the name and content of each file."""
    steps, density = frames["steps"], f"density {setup.density:g}"
    yield "steps", steps
    yield "simulate", report(setup, frames, command)
    drawn = steps[(steps["method"] == DENSE) | (steps["schedule"] == EXACT)]
    several = drawn["workers"].nunique() > 1  # a line needs several numbers of workers
    assumed = drawn["compute_s"].map(" ({:.3g} s of computation, ".format) + drawn["model"].map(setup.assumed) + ")"
    titled = drawn.assign(model=drawn["model"].map(human) + assumed)
    for (network, algorithm), shown in titled.groupby(["network", "algorithm"], sort=False) if several else ():
        title = f"Simulated speed-up, {network}, {algorithm}"
        title += "" if (shown["method"] == DENSE).all() else f", {density}"
        yield f"speedup-{network}-{algorithm}", (figures.draw_speedups(shown, title), shown)
    for key, shown in drawn.groupby(SETTING[:3], sort=False) if "breakdown" in setup.questions else ():
        yield f"breakdown-{'-'.join(map(str, key))}", (figures.draw_breakdown(shown, density), shown)
    for trace in setup.recorded if "sizes" in setup.questions else ():
        rows = tensor_numbers(trace)
        yield f"sizes-{trace.model}", (figures.draw_sizes(rows, f"{human(trace.model)} on {trace.device}"), rows)
    for key, rows in frames["timeline"].groupby(SETTING[:3], sort=False) if "timeline" in frames else ():
        yield f"timeline-{'-'.join(map(str, key))}", (figures.draw_timeline(rows), rows)
    if "levels" in frames:
        yield "levels", level_report(setup, frames["levels"], command)
        for network, rows in frames["levels"].groupby("network", sort=False):
            title = f"One level and two, simulated, {network!s}, {density}"
            yield f"levels-{network!s}", (figures.draw_levels(rows, title), rows)
    if "borders" in frames:
        rows = frames["borders"]
        title = f"Below its line a method is faster than dense: ring, {density}"
        yield "borders", (figures.draw_borders(rows, title, RATES), rows)
    if "headline" in frames:
        rows = frames["headline"]
        title = "Step of other schedules / step of MG-WFBP at 64 workers, beside the published"
        yield "headline", (figures.draw_headline(rows, title), rows)
        yield "nearest", nearest_gains(rows)


def tensor_numbers(trace: Trace) -> pd.DataFrame:
    """Return a row per tensor in the order of backward; columns tensor (from 1), name, num_bytes, ready_ms."""
    rows = [(layer.name, layer.num_bytes, 1e3 * layer.ready_s) for layer in trace.layers]
    return pd.DataFrame(rows, columns=["name", "num_bytes", "ready_ms"]).assign(tensor=range(1, len(rows) + 1))
