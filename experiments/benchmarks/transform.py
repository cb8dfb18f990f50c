"""The transform of FFT sparsification at lengths that are good and bad for an FFT, against a power of two.

The lengths are timed in turn, again and again, and compared round by round.
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
from experiments.config.option_types import whole_number
from experiments.reports.csv_files import write_csv
from experiments.reports.output import write_or_rescue
from micro.randomness import generator
from micro.transforms import padded_length, to_spectrum

NAME = "transform"
WARMUP = 1
RESNET18 = 11_173_962  # parameters of ResNet-18 for CIFAR-10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument(
        "--numel",
        type=comma_list(whole_number()),
        metavar="D,D",
        default=[1 << 23, RESNET18, 11_173_859, 11_173_969, 1 << 24],  # two primes beside ResNet-18's
        help="lengths; the first is what the others are compared with",
    )
    parser.add_argument("--rounds", type=whole_number(), default=5, help="rounds that count, after a warm-up")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the table."""
    with console.status("transforming"):
        frame = measure(arguments.numel, arguments.rounds)
    console.print(_table(frame, arguments.rounds))
    for path in write_or_rescue(lambda out: [write_csv(frame, out / "transform.csv")], arguments.out):
        console.print(f"wrote {path}")


def measure(lengths: list[int], rounds: int) -> pd.DataFrame:
    """Return a row per length: median milliseconds of ours and of torch's own rfft, and both over ours of the first."""
    vectors = {numel: torch.randn(numel, generator=generator(0, numel)) for numel in lengths}
    timed = [
        {numel: (_seconds(to_spectrum, x), _seconds(torch.fft.rfft, x)) for numel, x in vectors.items()}
        for _ in range(WARMUP + rounds)
    ][WARMUP:]
    base = lengths[0]
    rows = []
    for numel in lengths:
        ours, plain = zip(*(row[numel] for row in timed), strict=True)
        shares = [row[numel][0] / row[base][0] for row in timed]
        plain_shares = [row[numel][1] / row[base][0] for row in timed]
        rows.append(
            {
                "numel": numel,
                "padded": padded_length(numel),
                "ours_ms": 1e3 * statistics.median(ours),
                "rfft_ms": 1e3 * statistics.median(plain),
                "ours_share": statistics.median(shares),
                "rfft_share": statistics.median(plain_shares),
            }
        )
    return pd.DataFrame(rows)


def _seconds(transform: Callable[[Tensor], Tensor], x: Tensor) -> float:
    started = time.perf_counter()
    transform(x)
    return time.perf_counter() - started


def _table(frame: pd.DataFrame, rounds: int) -> Table:
    first = f"{frame['numel'].iloc[0]:,}"
    table = Table(title=f"real FFT of d numbers, {torch.get_num_threads()} threads; medians of {rounds} rounds")
    for column in ("d", "padded to", "ours ms", "rfft of d ms", f"ours / {first}", f"rfft of d / {first}"):
        table.add_column(column, justify="right")
    for _, row in frame.iterrows():
        table.add_row(
            f"{row['numel']:,.0f}",
            f"{row['padded']:,.0f}",
            *(f"{row[key]:.1f}" for key in ("ours_ms", "rfft_ms")),
            *(f"{row[key]:.2f}" for key in ("ours_share", "rfft_share")),
        )
    return table
