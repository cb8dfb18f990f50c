"""Measure the computation of a method's reduction, without collectives, by number of elements.

It covers selection and everything else except the exchange, on ranks that really reduce. The time of a step is that of
the slowest rank, the median over steps.
"""

import argparse
import itertools
import statistics
from pathlib import Path

import pandas as pd
import torch.distributed as dist
from rich.console import Console

from experiments.config.command_line import comma_list
from experiments.config.errors import UserError
from experiments.planning.tables import Curve, SelectTable
from experiments.tools.profile import method_steps
from experiments.tools.profile.on_ranks import device_name
from experiments.tools.ranks.measures import Row, Settings, own_device, slowest
from experiments.tools.shared.markdown import table
from experiments.tools.shared.methods import build_methods, known_methods, select_names
from experiments.tools.shared.options import to_density, whole_number

NAME = "select"
WARMUP = 8  # steps until thresholds settle
METHODS = "dense,topk,topk_gather,micro"
NUMEL = [2**power for power in range(10, 25, 2)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    add, lengths = parser.add_argument, comma_list(whole_number())
    add("--methods", type=comma_list(str), default=METHODS, metavar="A,B", help="of conf/sparsifier (%(default)s)")
    add("--density", type=to_density, default=0.01, help="target density, in (0, 1] (%(default)s)")
    add("--numel", type=lengths, default=NUMEL, metavar="D,D", help="lengths; by default 2^10 to 2^24")
    add("--steps", type=whole_number(), default=9, help="measured steps, after a warm-up (%(default)s)")


def prepare(options: argparse.Namespace, world_size: int) -> Settings:
    """Return the settings of the ranks.

    Raises:
        UserError: no such method, too few lengths, or a number out of range.
    """
    methods = select_names(options.methods, known_methods(), "methods")
    build_methods(methods, options.density)  # reports a mistake before ranks start
    lengths = sorted(set(options.numel))
    if len(lengths) < 2 or lengths[0] < 2:
        raise UserError(f"--numel must be two or more lengths of at least 2, got {','.join(map(str, options.numel))}")
    return {"methods": methods, "density": options.density, "numel": lengths, "steps": options.steps}


def work(settings: Settings) -> list[Row]:
    """Time all methods at all lengths; return a row of lengths and seconds for each method."""
    lengths, facts = settings["numel"], {"device": device_name(own_device()), "world_size": dist.get_world_size()}
    rows = []
    for method in settings["methods"]:
        taken = [own_seconds(method, numel, settings["density"], settings["steps"]) for numel in lengths]
        rows.append({"method": method, "numel": lengths, "seconds": list(itertools.accumulate(taken, max)), **facts})
    return rows


def own_seconds(method: str, numel: int, density: float, steps: int) -> float:
    """Return the median seconds of a method's reduction outside collectives, on the slowest rank."""
    method_steps.begin(method, numel, density)
    method_steps.turn(WARMUP)
    return statistics.median(slowest(row["own_s"], own_device()) for row in method_steps.turn(steps))


def merge(rows: list[Row], density: float) -> SelectTable:
    """Return the table of selections."""
    curves = {row["method"]: Curve(sizes=row["numel"], seconds=row["seconds"]) for row in rows}
    first = rows[0]
    return SelectTable(world_size=first["world_size"], density=density, device=first["device"], methods=curves)


def write(rows: list[Row], options: argparse.Namespace, console: Console) -> list[Path]:
    """Write the table of selections and print it; return the paths."""
    found = merge(rows, options.density)
    found.save(options.out)
    numbers = pd.DataFrame({row["method"]: row["seconds"] for row in rows}, index=rows[0]["numel"])
    cells = [[f"{numel:,}", *(f"{1e3 * each:.4g}" for each in own)] for numel, *own in numbers.itertuples()]
    title = f"Reduction without its collectives, density {found.density:g}, {found.world_size} ranks"
    console.print(f"{title}, ms\n\n{table(['elements', *numbers], cells)}", soft_wrap=True, highlight=False)
    return [options.out]
