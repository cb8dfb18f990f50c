"""A short run from its command to its end, against a bare torchrun of the same model and length.

Both train the MLP on the digits for one epoch on two processes of this machine, in turn. What the harness adds is the
check of the run before it starts, its records and the watch over its ranks.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console

from experiments.config.errors import UserError
from experiments.config.option_types import whole_number
from experiments.launching.child_environment import child_environment
from experiments.reports.csv_files import write_csv
from experiments.reports.output import write_or_rescue

NAME = "start"
TRAIN = ("-m", "experiments.train", "model=mlp", "epochs=1")
BARE = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "experiments.benchmarks.bare_training")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument("--pairs", type=whole_number(), default=5, help="of runs that count, after one of each")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print and write the table. Raises: UserError: one of the two commands fails."""
    pairs = []
    with tempfile.TemporaryDirectory(prefix="micro-start-") as folder:
        for pair in range(1 + arguments.pairs):
            with console.status(f"pair {pair} of {arguments.pairs}"):
                ours = timed([*TRAIN, f"output={folder}/{pair}", "tracking=none"])
                bare = timed([*BARE, str(Path(folder) / f"{pair}.pt")])
            pairs.append({"ours_s": ours[0], "bare_s": bare[0], "ours_cpu_s": ours[1], "bare_cpu_s": bare[1]})
    frame = with_ratios(pairs[1:])
    console.print(in_words(frame))
    for path in write_or_rescue(lambda out: [write_csv(frame, out / "start.csv")], arguments.out):
        console.print(f"wrote {path}")


def timed(words: Sequence[str]) -> tuple[float, float]:
    """Run this Python with words; return the seconds that passed, and those of processors in all its processes."""
    started, before = time.perf_counter(), _processor_s()
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(
        [sys.executable, *words], env=child_environment(**variables), capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise UserError(f"'python {' '.join(words)}' failed: {last}")
    return time.perf_counter() - started, _processor_s() - before


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def with_ratios(pairs: Sequence[dict[str, float]]) -> pd.DataFrame:
    """Return a row per pair of runs, with the ratios of its times."""
    frame = pd.DataFrame(pairs)
    return frame.assign(
        ratio=frame["ours_s"] / frame["bare_s"], processor_ratio=frame["ours_cpu_s"] / frame["bare_cpu_s"]
    )


def in_words(frame: pd.DataFrame) -> str:
    """Return the medians over pairs, with the smallest and the largest ratio."""
    middle = {column: statistics.median(frame[column]) for column in frame}
    least, most = frame.min(), frame.max()
    return (
        f"train model=mlp epochs=1: {middle['ours_s']:.2f} s, bare torchrun {middle['bare_s']:.2f} s; ratio "
        f"{middle['ratio']:.2f} ({least['ratio']:.2f} to {most['ratio']:.2f}), of processor time "
        f"{middle['processor_ratio']:.2f} ({least['processor_ratio']:.2f} to {most['processor_ratio']:.2f}); "
        f"{len(frame)} pairs"
    )
