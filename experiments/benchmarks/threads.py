"""Compiled loops on the threads that a rank has against the same loops on one thread.

Both are timed in turn, again and again, and compared by their fastest rounds: what else runs on the machine only slows.
torch's own addition and sum stand beside them: what these gain is what the machine's memory allows.
"""

import argparse
import time
from collections.abc import Callable

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from experiments.config.command_line import comma_list
from experiments.config.option_types import whole_number
from experiments.reports.csv_files import write_csv
from experiments.reports.output import write_or_rescue
from micro import kernels
from micro.kernels import places
from micro.randomness import generator

NAME = "threads"
WARMUP = 2
THRESHOLD = 2.5758  # a hundredth of normal numbers has at least this magnitude
Row = dict[str, str | float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument(
        "--numel", type=comma_list(whole_number()), default="4000000,25557032", metavar="D,D", help="lengths"
    )
    parser.add_argument(
        "--threads", type=whole_number(), default=torch.get_num_threads(), help="of the rank (%(default)s)"
    )
    parser.add_argument("--pairs", type=whole_number(), default=15, help="rounds that count, after a warm-up")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the table."""
    kernels.prepare()
    rows: list[Row] = []
    before = torch.get_num_threads()
    try:
        for numel in arguments.numel:
            for name, loop in loops(numel).items():
                with console.status(f"{name}, d = {numel:,}"):
                    times = compare(loop, arguments.threads, arguments.pairs)
                rows.append({"loop": name, "numel": numel} | times)
    finally:
        torch.set_num_threads(before)
    frame = pd.DataFrame(rows).assign(threads=arguments.threads)
    console.print(_table(rows, arguments.threads, arguments.pairs))
    for path in write_or_rescue(lambda out: [write_csv(frame, out / "threads.csv")], arguments.out):
        console.print(f"wrote {path}")


def loops(numel: int) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name, on vectors of ``numel``."""
    grad = torch.randn(numel, generator=generator(0, numel))
    residual, searched = torch.zeros(numel), grad.clone()
    indices = kernels.above(searched, THRESHOLD)
    values = searched.index_select(0, indices)
    return {
        "add the gradient": lambda: kernels.absorb_(residual, grad),
        "add the gradient, bfloat16": _narrow(residual, grad),
        "scan": lambda: kernels.above(searched, THRESHOLD),
        "count by magnitude": lambda: kernels.magnitude_counts(searched, first_bit_pattern=0, shift=20, num_bins=0x7F8),
        "take a hundredth at indices": lambda: places.take_(residual, indices, values),
        "torch: add": lambda: residual.add_(grad),
        "torch: sum": lambda: searched.sum(),
    }


def _narrow(residual: Tensor, grad: Tensor) -> Callable[[], object]:
    narrow = grad.bfloat16()
    return lambda: kernels.absorb_(residual, narrow)


def compare(loop: Callable[[], object], num_threads: int, pairs: int) -> dict[str, float]:
    """Return the fewest milliseconds of a loop on one thread and on ``num_threads``, and the first by the second."""
    timed: dict[int, list[float]] = {1: [], num_threads: []}
    for _ in range(WARMUP + pairs):
        for number, seconds in timed.items():
            torch.set_num_threads(number)
            started = time.perf_counter()
            loop()
            seconds.append(time.perf_counter() - started)
    one, several = (1e3 * min(seconds[WARMUP:]) for seconds in (timed[1], timed[num_threads]))
    return {"one thread ms": one, "threads ms": several, "times as fast": one / several}


def _table(rows: list[Row], num_threads: int, pairs: int) -> Table:
    table = Table(title=f"loops on {num_threads} threads; the fastest of {pairs} rounds")
    table.add_column("loop")
    for name in ("d", "1 thread ms", f"{num_threads} threads ms", "times as fast"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = (row[key] for key in ("one thread ms", "threads ms", "times as fast"))
        table.add_row(str(row["loop"]), f"{row['numel']:,.0f}", *(f"{number:.3g}" for number in numbers))
    return table
