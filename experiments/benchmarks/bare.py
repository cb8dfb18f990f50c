"""Packing, FFT sparsification and PowerSGD against the bare work in them.

Packed bits against a copy of them and a read of the numbers, a step of `fft` against its pair of transforms, a step of
`powersgd` against its products of matrices. Each pair is timed in turn, again and again, on one thread, and compared by
the fastest rounds: what else runs on the machine only slows.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import closing

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import micro
from experiments.config.command_line import comma_list
from experiments.config.option_types import to_density, whole_number
from experiments.reports.csv_files import write_csv
from experiments.reports.output import write_or_rescue
from experiments.studies.gradient_sources import layered
from experiments.studies.methods import build_methods
from micro.bits import pack, unpack
from micro.index_codecs import Bitmap, IndexCodec, Packed
from micro.randomness import generator
from micro.reducers.matrices import batches_of
from micro.thread_ranks import SimulatedGroup
from micro.transforms import from_spectrum_, to_spectrum

NAME = "bare"
WARMUP = 2
WIDTHS = (1, 2, 3, 4, 6, 8, 10, 16)
NUM_CODES = 1 << 20
GOALS = {"packing": 2.0, "fft": 1.3, "powersgd": 1.3}
Call = Callable[[], object]
Row = dict[str, str | float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument("--numel", type=whole_number(), default=11_181_642, help="length (%(default)s: ResNet-18)")
    parser.add_argument(
        "--density", type=comma_list(to_density), default="0.05,0.01,0.001", metavar="P,P", help="(%(default)s)"
    )
    parser.add_argument("--rounds", type=whole_number(), default=9, help="rounds that count, after a warm-up")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the table."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with console.status("measuring"):
            rows = measure(arguments.numel, arguments.density, arguments.rounds)
    finally:
        torch.set_num_threads(before)
    console.print(_table(rows, arguments.numel, arguments.rounds))
    frame = pd.DataFrame(rows).assign(numel=arguments.numel)
    for path in write_or_rescue(lambda out: [write_csv(frame, out / "bare.csv")], arguments.out):
        console.print(f"wrote {path}")


def measure(numel: int, densities: list[float], rounds: int) -> list[Row]:
    """Return a row for each pair: fewest milliseconds of the work and of its bare part, their ratio, and the goal."""
    rows = []
    for width in WIDTHS:
        rows += _packing(width, rounds)
    for density in densities:
        rows += _indices(numel, density, rounds)
    reducers = build_methods(["fft", "powersgd"], densities[0])
    gradient = torch.randn(numel, generator=generator(0, numel))
    for name, bare in (("fft", _pair(gradient)), ("powersgd", _products(gradient))):
        with closing(SimulatedGroup(1)) as group:
            rows.append(_compared(name, "a step", _step(reducers[name], gradient, group), bare, rounds, GOALS[name]))
    return rows


def _packing(width: int, rounds: int) -> list[Row]:
    codes = torch.randint(2**width, (NUM_CODES,), generator=generator(0, width)).to(torch.int32)
    packed = pack(codes, width)
    bare, name = _copied(packed, codes), f"{NUM_CODES:,} codes of {width} bits"
    return [
        _compared(name, "pack", lambda: pack(codes, width), bare, rounds, GOALS["packing"]),
        _compared(name, "unpack", lambda: unpack(packed, NUM_CODES, width), bare, rounds, GOALS["packing"]),
    ]


def _indices(numel: int, density: float, rounds: int) -> list[Row]:
    chosen = torch.rand(numel, generator=generator(0, numel)) < density
    indices = torch.nonzero(chosen).view(-1).to(torch.int32)
    codecs: list[IndexCodec] = [Packed(), Bitmap()] if density >= 1 / 32 else [Packed()]
    return [row for codec in codecs for row in _index_rows(codec, indices, numel, density, rounds)]


def _index_rows(codec: IndexCodec, indices: Tensor, numel: int, density: float, rounds: int) -> list[Row]:
    wire, count = codec.encode(indices, numel), indices.numel()
    bare, name, goal = _copied(wire, indices), f"indices {codec.name}, density {density:g}", GOALS["packing"]
    return [
        _compared(name, "pack", lambda: codec.encode(indices, numel), bare, rounds, goal),
        _compared(name, "unpack", lambda: codec.decode(wire, count, numel), bare, rounds, goal),
    ]


def _copied(packed: Tensor, numbers: Tensor) -> Call:
    copy = torch.empty_like(packed)
    return lambda: (copy.copy_(packed), numbers.max())


def _pair(gradient: Tensor) -> Call:
    return lambda: from_spectrum_(to_spectrum(gradient), gradient.numel())


def _products(gradient: Tensor) -> Call:
    """Return the four products of a PowerSGD step: M Q, M^T P, and P Q^T of its own and of the mean factors."""
    reducer = micro.PowerSGD()
    batches = batches_of(layered(gradient.numel()), reducer.rank, reducer.min_compression)
    matrices = [batch.gather(gradient) for batch in batches]
    right = [torch.randn(len(batch.names), batch.columns, batch.rank) for batch in batches]

    def multiply() -> None:
        for matrix, factor in zip(matrices, right, strict=True):
            left = matrix @ factor
            own = matrix.mT @ left
            _ = left @ own.mT, left @ factor.mT

    return multiply


def _step(reducer: micro.Reducer, gradient: Tensor, group: SimulatedGroup) -> Call:
    """Return a step of a single rank, which sends nothing; the copy of the gradient is part of it."""
    state = reducer.start(layered(gradient.numel()), torch.float32, gradient.device)
    grad = torch.empty_like(gradient)

    def work(comm: micro.Comm) -> None:
        grad.copy_(gradient)
        comm.begin_step()
        reducer.reduce_(state, grad, comm)

    return lambda: group.run(work)


def _compared(name: str, what: str, work: Call, bare: Call, rounds: int, goal: float) -> Row:
    timed = [(_seconds(work), _seconds(bare)) for _ in range(WARMUP + rounds)][WARMUP:]
    ours, least = (1e3 * min(seconds) for seconds in zip(*timed, strict=True))
    return {"name": name, "work": what, "ours_ms": ours, "bare_ms": least, "ratio": ours / least, "goal": goal}


def _seconds(call: Call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _table(rows: list[Row], numel: int, rounds: int) -> Table:
    table = Table(title=f"d = {numel:,}, one thread; the fastest of {rounds} rounds")
    for column in ("of", "work", "ours ms", "bare ms", "ours / bare", "goal", "met"):
        table.add_column(column, justify="left" if column in ("of", "work") else "right")
    for row in rows:
        met = "yes" if float(row["ratio"]) <= float(row["goal"]) else "no"
        numbers = (f"{float(row[key]):.3g}" for key in ("ours_ms", "bare_ms", "ratio", "goal"))
        table.add_row(str(row["name"]), str(row["work"]), *numbers, met)
    return table
