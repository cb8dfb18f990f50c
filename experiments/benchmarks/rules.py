"""The density that MiCRO's three rules give, on synthetic gradients with a tenfold jump of scale.

Simulated ranks with error feedback, four kinds of gradients; at two thirds of the steps the scale rises tenfold.
"""

import argparse
from collections.abc import Callable

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import micro
from experiments.config.option_types import to_density, whole_number
from experiments.reports.figure_parts import save
from experiments.reports.output import write_or_rescue
from experiments.reports.rule_figure import draw_rules
from experiments.studies.gradient_sources import laplace, layers, normal, student
from micro.randomness import generator

NAME = "rules"
RULES = ("agreed", "repaired", "published")
SETTLED = 20  # steps after which the repaired rule is held to its bound
RECOVERED = 10  # steps after a jump that it is given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument("--numel", type=whole_number(), default=100_000)
    parser.add_argument("--density", type=to_density, default=0.001)
    parser.add_argument("--world-size", type=whole_number(), default=4)
    parser.add_argument("--steps", type=whole_number(), default=180)


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Run all rules on all streams, print the errors, write figure and table."""
    numel, density, world_size, steps = arguments.numel, arguments.density, arguments.world_size, arguments.steps
    frames = []
    for rule in RULES:
        for stream, draw in STREAMS.items():
            with console.status(f"{rule} on {stream} gradients"):
                frames.append(_trace(rule, stream, draw, numel, density, world_size, steps))
    frame = pd.concat(frames, ignore_index=True)
    table = _table(frame, steps)
    title = f"MiCRO's rules: d = {numel:,}, density {density:g}, {world_size} ranks, scale x 10 at step {_jump(steps)}"
    console.print(table)
    for path in write_or_rescue(lambda out: save(draw_rules(frame, title), frame, out / "rules"), arguments.out):
        console.print(f"wrote {path}")


STREAMS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "normal": normal,
    "Laplace": laplace,
    "Student t(3)": student,
    "layers of different scale": layers,
}


def _jump(steps: int) -> int:
    return 2 * steps // 3


def _trace(
    rule: str,
    stream: str,
    draw: Callable[[int, torch.Generator], Tensor],
    numel: int,
    density: float,
    n: int,
    steps: int,
) -> pd.DataFrame:
    reducer = micro.SparseReducer(micro.build(micro.Selector, {"name": "micro", "rule": rule}), density)
    simulation = micro.Simulation(reducer, micro.Layout.flat(numel), n)
    rows = []
    for step in range(steps):
        scale = 1e-3 * (10 if step >= _jump(steps) else 1)
        gradients = torch.stack([scale * draw(numel, generator(0, step, rank)) for rank in range(n)])
        (stats, *_) = simulation.step_(gradients)
        rows.append(
            {
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
        )
    simulation.close()
    return pd.DataFrame(rows)


def _table(frame: pd.DataFrame, steps: int) -> Table:
    k = int(frame["target_count"].iloc[0])
    jump = _jump(steps)
    settled = (frame["step"] >= SETTLED) & ~frame["step"].between(jump, jump + RECOVERED - 1)
    table = Table(title=f"density error, k = {k} (3 / sqrt(k) = {3 / k**0.5:.3f})")
    for column in ("rule", "stream", "worst from the first step", f"worst after {SETTLED} steps *", "mean count / k *"):
        table.add_column(column, justify="left" if column in ("rule", "stream") else "right")
    for (rule, stream), rows in frame.groupby(["rule", "stream"], sort=False):
        later = rows[settled.loc[rows.index]]
        table.add_row(
            str(rule),
            str(stream),
            f"{rows['error'].max():.3f}",
            f"{later['error'].max():.3f}",
            f"{later['count'].mean() / k:.3f}",
        )
    table.caption = f"* without the {RECOVERED} steps from the jump at {jump}"
    return table
