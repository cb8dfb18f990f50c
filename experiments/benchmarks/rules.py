"""The density that MiCRO's rules give, on synthetic gradients with a tenfold jump of scale.

Simulated ranks with error feedback, four kinds of gradients; at two thirds of the steps the scale rises tenfold.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console

import micro
from experiments.benchmarks import tables
from experiments.benchmarks.tables import Column, Columns
from experiments.config.option_types import to_density, whole_number
from experiments.ranks.measures import Row
from experiments.reports.figure_parts import Panel, figure_of_facets, named_lines, plain_log
from experiments.reports.plot_style import DASHES, PALETTE, TARGET_LINE, LineSettings, style
from experiments.studies.gradient_sources import SHAPES, TITLES
from micro.randomness import generator

NAME = "rules"
RULES = ("agreed", "published")
SETTLED = 20  # steps after which a rule that steers is to have settled
RECOVERED = 10  # steps after a jump that it is given
STREAMS = {TITLES[stream]: SHAPES[stream] for stream in ("normal", "laplace", "student", "layers")}
COLUMNS: Columns = {
    "rule": Column("rule"),
    "gradients": Column("stream"),
    "worst error from the first step": Column("worst", "{:.3f}"),
    f"worst error after {SETTLED} steps *": Column("worst_settled", "{:.3f}"),
    "mean count / k *": Column("count_share", "{:.3f}"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument("--numel", type=whole_number(), default=100_000)
    parser.add_argument("--density", type=to_density, default=0.001)
    parser.add_argument("--world-size", type=whole_number(), default=4)
    parser.add_argument("--steps", type=whole_number(), default=180)


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Run all rules on all streams, print the errors, write figure and table."""
    jump = 2 * arguments.steps // 3
    rows: list[Row] = []
    for rule in RULES:
        for stream in STREAMS:
            with console.status(f"{rule} on {stream} gradients"):
                rows += _trace(rule, stream, arguments, jump)
    frame = pd.DataFrame(rows)
    what = f"d = {arguments.numel:,}, density {arguments.density:g}, {arguments.world_size} simulated ranks"
    when = f"the scale of the gradients rises tenfold at step {jump} of {arguments.steps}"
    note = f"{what}; {when}. * without the {RECOVERED} steps from there on."
    figure = draw_rules(frame, f"MiCRO's rules: {what}, scale x 10 at step {jump}")
    blocks = [note, tables.table(errors(frame, jump), COLUMNS)]
    tables.write(frame, "MiCRO's rules on synthetic gradients", blocks, arguments, console, figure)


def errors(frame: pd.DataFrame, jump: int) -> pd.DataFrame:
    """Return for each rule and stream the worst errors of the density, and the mean count by the target's."""
    settled = frame[(frame["step"] >= SETTLED) & ~frame["step"].between(jump, jump + RECOVERED - 1)]
    keys = ["rule", "stream"]
    shares = (settled["count"] / settled["target_count"]).groupby([settled[key] for key in keys]).mean()
    worst = frame.groupby(keys, sort=False)["error"].max().rename("worst")
    late = settled.groupby(keys)["error"].max().rename("worst_settled")
    return pd.concat([worst, late, shares.rename("count_share")], axis="columns").reset_index()


def _trace(rule: str, stream: str, arguments: argparse.Namespace, jump: int) -> Iterator[Row]:
    selector = micro.build(micro.Selector, {"name": "micro", "rule": rule})
    reducer = micro.SparseReducer(selector, arguments.density)
    simulation = micro.Simulation(reducer, micro.Layout.flat(arguments.numel), arguments.world_size)
    for step in range(arguments.steps):
        scale = 1e-3 * (10 if step >= jump else 1)
        draws = [STREAMS[stream](arguments.numel, generator(0, step, rank)) for rank in range(arguments.world_size)]
        (stats, *_) = simulation.step_(scale * torch.stack(draws))
        yield {
            "rule": rule,
            "stream": stream,
            "step": step,
            "density": stats.global_density,
            "target_density": stats.target_density,
            "threshold": stats.threshold,
            "error": stats.density_error,
            "count": stats.global_count,
            "target_count": stats.target_count,
        }


@style()
def draw_rules(frame: pd.DataFrame, title: str) -> Figure:
    """Density, and below it the threshold, over steps: one column of panels per rule, one line per stream."""
    streams = {(stream,): _stream_line(place) for place, stream in enumerate(dict.fromkeys(frame["stream"]))}
    lines, target = named_lines(["stream"], streams, str), Line2D([], [], label="target", **TARGET_LINE)

    def draw_target(axes: Axes, rows: pd.DataFrame) -> None:
        target = rows.groupby("step")["target_density"].first()
        axes.plot(target.index, target, **TARGET_LINE)

    panel = Panel(x="step", x_name="step", show_y=plain_log)
    panels = [
        replace(panel, y="density", y_name="density", also=draw_target),
        replace(panel, y="threshold", y_name="threshold"),
    ]
    drawn = frame.sort_values("rule", key=lambda rules: -rules.map(RULES.index), kind="stable")
    return figure_of_facets(title, drawn, ["rule"], panels, lines, [target], height=1.3)


def _stream_line(place: int) -> LineSettings:
    return {"color": PALETTE[place % len(PALETTE)], "linestyle": DASHES[place % len(DASHES)], "linewidth": 0.8}
