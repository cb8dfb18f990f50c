"""What a rank computes for one bucket as ranks grow in number: collectives answer at once, the others do as it does.

Numbers of ranks are timed in turn, step by step, and compared pair by pair with the first of them.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import micro
from experiments.config.command_line import comma_list
from experiments.config.errors import UserError
from experiments.config.option_types import to_density, whole_number
from experiments.reports.csv_files import write_csv
from experiments.reports.output import write_or_rescue
from experiments.studies.methods import build_methods, known_methods, select_names
from experiments.studies.mirrored_ranks import MirroredComm
from micro import kernels
from micro.randomness import generator

NAME = "ranks"
WARMUP = 5
NUM_GRADIENTS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument("--numel", type=whole_number(), default=102_400, help="length d of the bucket (%(default)s)")
    parser.add_argument("--density", type=to_density, default=0.01, help="(%(default)s)")
    parser.add_argument(
        "--ranks", type=comma_list(whole_number(2)), default="4,64,1024", metavar="N,N", help="(%(default)s)"
    )
    parser.add_argument(
        "--methods", type=comma_list(str), default="micro", metavar="A,B", help="names of conf/sparsifier (%(default)s)"
    )
    parser.add_argument("--steps", type=whole_number(), default=50, help="steps that count, after a warm-up")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the table."""
    if max(arguments.ranks) > arguments.numel:
        raise UserError(f"--ranks must be at most --numel, {arguments.numel}, got {max(arguments.ranks)}")
    kernels.prepare()
    methods = select_names(arguments.methods, known_methods(), "methods")
    reducers = build_methods(methods, arguments.density)
    rows: list[dict[str, object]] = []
    for name, reducer in reducers.items():
        with console.status(name):
            rows += [{"method": name} | row for row in measure(reducer, arguments)]
    frame = pd.DataFrame(rows).assign(numel=arguments.numel, density=arguments.density)
    console.print(_table(frame, arguments))
    for path in write_or_rescue(lambda out: [write_csv(frame, out / "ranks.csv")], arguments.out):
        console.print(f"wrote {path}")


def measure(reducer: micro.Reducer, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Return a row per number of ranks: median milliseconds of a step, and their ratio to those of the first."""
    drawn = generator(0, arguments.numel)
    gradients = [torch.randn(arguments.numel, generator=drawn) for _ in range(NUM_GRADIENTS)]
    steps = [stepper(reducer, gradients, world_size) for world_size in arguments.ranks]
    timed = [[step() for step in steps] for _ in range(WARMUP + arguments.steps)][WARMUP:]
    return [
        {
            "ranks": world_size,
            "ms": 1e3 * statistics.median(row[place] for row in timed),
            "ratio": statistics.median(row[place] / row[0] for row in timed),
        }
        for place, world_size in enumerate(arguments.ranks)
    ]


def stepper(reducer: micro.Reducer, gradients: Sequence[Tensor], world_size: int) -> Callable[[], float]:
    """Return what reduces one gradient after the other, each with an empty residual, and returns the seconds."""
    comm, numel = MirroredComm(world_size), gradients[0].numel()
    state = reducer.start(micro.Layout.flat(numel), torch.float32, torch.device("cpu"))

    def step() -> float:
        for kept in state.memory.values():
            kept.zero_()
        grad = gradients[state.step % len(gradients)].clone()
        comm.begin_step()
        started = time.perf_counter()
        reducer.reduce_(state, grad, comm)
        return time.perf_counter() - started

    return step


def _table(frame: pd.DataFrame, arguments: argparse.Namespace) -> Table:
    table = Table(
        title=f"d = {arguments.numel:,}, density {arguments.density:g}, {torch.get_num_threads()} threads; "
        f"medians of {arguments.steps} steps"
    )
    for column in ("method", "ranks", "ms", f"to {arguments.ranks[0]} ranks"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for _, row in frame.iterrows():
        table.add_row(row["method"], f"{row['ranks']:,}", f"{row['ms']:.3f}", f"{row['ratio']:.2f}")
    return table
