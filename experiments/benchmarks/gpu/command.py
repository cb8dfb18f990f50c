"""Triton's kernels: right, fast and free of reads by the host on a GPU; compiled for GPUs that are not there.

Without a GPU they are compiled alone. The command ends with status 1 where a kernel is wrong or badly compiled.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping

import pandas as pd
import torch
from rich.console import Console

from experiments.benchmarks import tables
from experiments.benchmarks.gpu import checks, compiling, steps, timing
from experiments.benchmarks.gpu.variants import variants
from experiments.benchmarks.tables import Column, Columns
from experiments.config.errors import UserError
from experiments.config.option_types import whole_number
from experiments.ranks.group import measuring_ranks
from experiments.ranks.measures import Row
from experiments.studies.methods import known_methods

NAME = "gpu"
BANDWIDTHS = {"A100": 2.04e12, "H100": 3.35e12, "B200": 8.0e12}  # bytes a second, as NVIDIA states them (80 GB, SXM)
SOUND = "All kernels spill nothing and move whole vectors 16 bytes at a time; none that was run differs from torch."
EXAMPLE = 25_557_032  # parameters of ResNet-50
CHECKED: Columns = {"kernel": Column("kernel"), "result": Column("result")}
TRAFFIC: Columns = {
    "kernel": Column("kernel"),
    "dtypes": Column("dtypes"),
    "bytes per element": Column("traffic"),
    f"least ms on {', '.join(BANDWIDTHS)} at d = {EXAMPLE:,}": Column("least"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    help = "elements of the vectors that are timed"
    parser.add_argument("--numel", type=whole_number(), metavar="D", default=EXAMPLE, help=help)


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Check, measure where there is a GPU, and write a report that can be pasted into an issue."""
    try:
        import triton
    except ImportError:
        raise UserError("triton is not installed: torch's wheels for CUDA on Linux bring it") from None
    if triton.knobs.runtime.interpret:
        raise UserError("TRITON_INTERPRET is set, and interpreted kernels cannot be compiled: unset it")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    with console.status("checking and compiling the kernels"):
        problems = checks.problems(device) if device else {}
        frame = pd.DataFrame(compiling.compiled(variants()))
        found = faults(problems, frame)
        blocks = [f"triton {triton.__version__}, {_name(device)}.", *found]
        if device:
            rows = [{"kernel": name, "result": problem or "equal"} for name, problem in problems.items()]
            blocks += ["## Against torch, on the device", _table(rows, CHECKED), *_measured(device, arguments.numel)]
        blocks += ["## Compiled ahead of time", tables.table(frame, compiling.COLUMNS)]
        blocks += ["## Bytes that each kernel moves", _table(traffic_rows(), TRAFFIC)]
    tables.write(frame, "GPU kernels", blocks, arguments, console)
    if found != [SOUND]:
        sys.exit(1)


def _measured(device: torch.device, numel: int) -> Iterator[str]:
    """Yield the sections about kernels on a device, and about steps on all of them."""
    yield f"## Kernels at d = {numel:,}, float32, density {timing.DENSITY}"
    yield _table(timing.kernel_rows(device, numel), timing.KERNELS)
    for num_gpus in dict.fromkeys((1, torch.cuda.device_count())):
        with measuring_ranks(num_gpus) as ranks:
            yield f"## Steps on {num_gpus} GPU(s) over NCCL at d = {numel:,}, density {steps.DENSITY}"
            yield _table(steps.rows(ranks, known_methods(), numel), steps.COLUMNS)


def _name(device: torch.device | None) -> str:
    if device is None:
        return "no GPU: nothing below has run on one"
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} visible"


def faults(problems: Mapping[str, str], frame: pd.DataFrame) -> list[str]:
    """Return a line for each kernel that is wrong or badly compiled, or the one that says that there is none."""
    wrong = [f"WRONG: {name}: {problem}" for name, problem in problems.items() if problem]
    bad = frame[~frame["is_sound"].astype(bool)]
    return wrong + [f"BADLY COMPILED: {row['kernel']} for {row['gpu']}" for _, row in bad.iterrows()] or [SOUND]


def traffic_rows() -> Iterator[Row]:
    """Yield for each kernel its bytes an element, and the least time that they take at the bandwidth of the memory."""
    for each in variants():
        least = ", ".join(f"{1e3 * each.element_bytes * EXAMPLE / rate:.3f}" for rate in BANDWIDTHS.values())
        words = {"traffic": each.traffic, "least": least if each.element_bytes else "-"}
        yield {"kernel": each.kernel, "dtypes": each.dtypes, **words}


def _table(rows: Iterable[Row], columns: Columns) -> str:
    return tables.table(pd.DataFrame(rows), columns)
