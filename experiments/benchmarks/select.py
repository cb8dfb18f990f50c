"""Selection by threshold against torch's ways to do it, and against one read of what is searched.

The ways are timed in turn, again and again, and compared pair by pair, so that a machine that slows down slows both.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from experiments.config.command_line import comma_list
from experiments.config.option_types import to_density, whole_number
from experiments.reports.csv_files import write_csv
from experiments.reports.output import write_or_rescue
from micro import kernels
from micro.randomness import generator

NAME = "select"
WARMUP = 2
OURS = "above"
Row = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument(
        "--numel",
        type=comma_list(whole_number()),
        default="4000000,16000000,64000000",
        metavar="D,D",
        help="lengths, beyond the cache",
    )
    parser.add_argument(
        "--density", type=comma_list(to_density), default="0.01,0.001", metavar="P,P", help="share that passes"
    )
    parser.add_argument("--pairs", type=whole_number(), default=15, help="rounds that count, after a warm-up")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the table."""
    kernels.prepare()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for numel in arguments.numel:
        x = torch.randn(numel, generator=generator(0, numel)).to(device)
        for density in arguments.density:
            with console.status(f"d = {numel:,}, density {density:g}"):
                threshold = -statistics.NormalDist().inv_cdf(density / 2)
                rows.append({"numel": numel, "density": density} | compare(x, threshold, arguments.pairs))
    frame = pd.DataFrame(rows)
    console.print(_table(frame, arguments.pairs, device))
    for path in write_or_rescue(lambda out: [write_csv(frame, out / "select.csv")], arguments.out):
        console.print(f"wrote {path}")


def ways(x: Tensor, threshold: float) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name: ours, torch's two, and one read of ``x`` (numel,)."""
    return {
        OURS: lambda: kernels.above(x, threshold),
        "torch.where": lambda: torch.where(x.abs() >= threshold)[0],
        "torch.nonzero": lambda: torch.nonzero(x.abs() >= threshold).view(-1),
        "torch.sum": lambda: x.sum(),
    }


def compare(x: Tensor, threshold: float, pairs: int) -> Row:
    """Return median milliseconds of each way, and the median over rounds of ours divided by each other."""
    timed = [{name: _seconds(work, x) for name, work in ways(x, threshold).items()} for _ in range(WARMUP + pairs)]
    counted = timed[WARMUP:]
    times = {f"{name} ms": 1e3 * statistics.median(row[name] for row in counted) for name in counted[0]}
    others = [name for name in counted[0] if name != OURS]
    return times | {f"ours / {name}": statistics.median(row[OURS] / row[name] for row in counted) for name in others}


def _seconds(work: Callable[[], object], x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    started = time.perf_counter()
    work()
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - started


def _table(frame: pd.DataFrame, pairs: int, device: torch.device) -> Table:
    threads = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    table = Table(title=f"indices with abs(x) >= threshold, normal x, {threads}; medians of {pairs} rounds")
    for column in frame:
        table.add_column(str(column), justify="right")
    for _, row in frame.iterrows():
        table.add_row(
            f"{row['numel']:,.0f}", f"{row['density']:g}", *(f"{row[column]:.3g}" for column in frame.columns[2:])
        )
    return table
