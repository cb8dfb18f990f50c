"""Triton's kernels: right, fast and free of reads by the host on a GPU; without one, what can be proven there.

Without a GPU the kernels run in Triton's interpreter, and are compiled for GPUs that are not there.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console

from experiments.benchmarks import compiled_kernels, gpu_ranks, gpu_timings, kernel_checks
from experiments.benchmarks.compiled_codes import code_variants
from experiments.benchmarks.compiled_kernels import Compiled, Variant
from experiments.benchmarks.kernel_checks import Outcome
from experiments.config.errors import UserError
from experiments.config.option_types import whole_number
from experiments.reports.output import write_file, write_or_rescue
from experiments.studies.methods import known_methods

NAME = "gpu"
BANDWIDTHS = {"A100": 2.04e12, "H100": 3.35e12, "B200": 8.0e12}  # bytes a second, as NVIDIA states them (80 GB, SXM)
SOUND = "All kernels equal the reference, spill nothing, and move whole vectors 16 bytes at a time."
EXAMPLE = 25_557_032  # parameters of ResNet-50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument(
        "--numel", type=whole_number(), metavar="D", default=EXAMPLE, help="elements of the vectors that are timed"
    )


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Check, measure where there is a GPU, and write a report that can be pasted into an issue."""
    try:
        import triton
    except ImportError:
        raise UserError("triton is not installed: torch's wheels for CUDA on Linux bring it") from None
    if triton.knobs.runtime.interpret:
        raise UserError("TRITON_INTERPRET is set, and interpreted kernels cannot be compiled: unset it")
    with console.status("checking the kernels"):
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        checked = interpreted() if device is None else list(kernel_checks.outcomes(device))
        variants = [*compiled_kernels.variants(), *code_variants()]
        results = list(compiled_kernels.compiled(variants))
        found = faults(checked, results)
        lines = [f"torch {torch.__version__}, triton {triton.__version__}, {_name(device)}.", "", *found]
        lines += ["", f"## Against the reference, {_where(device)}", "", *outcome_table(checked)]
        if device:
            lines += gpu_timings.report(device, arguments.numel)
            lines += gpu_ranks.report(known_methods(), arguments.numel, torch.cuda.device_count())
        lines += ["", "## Compiled ahead of time", "", *compiled_table(results)]
        lines += ["", "## Bytes that each kernel moves", "", *traffic_table(variants)]
    text = "\n".join(lines) + "\n"
    console.print(text, markup=False, soft_wrap=True)
    for path in write_or_rescue(lambda out: [write_file(out / "gpu.md", text)], arguments.out):
        console.print(f"wrote {path}")
    if found != [SOUND]:
        sys.exit(1)


def _name(device: torch.device | None) -> str:
    if device is None:
        return "no GPU: nothing below has run on one"
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} visible"


def _where(device: torch.device | None) -> str:
    return "in Triton's interpreter on the CPU" if device is None else "on the device"


def faults(checked: Sequence[Outcome], results: Sequence[Compiled]) -> list[str]:
    """Return a line for each kernel that is wrong or badly compiled, or the one that says that there is none."""
    wrong = [f"WRONG: {each.kernel} {each.problem}" for each in checked if each.problem]
    bad = [f"BADLY COMPILED: {each}" for each in results if not each.is_sound]
    return wrong + bad or [SOUND]


def interpreted() -> list[Outcome]:
    """Return what the checks say in a process of their own, in which Triton interprets."""
    command = [sys.executable, "-m", kernel_checks.__name__]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the checks in Triton's interpreter failed: {done.stderr.strip()[-2000:]}")
    return [Outcome(**row) for row in json.loads(done.stdout)]


def outcome_table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Return a row per kernel, as Markdown."""
    yield "| kernel | cases | result |"
    yield "|---|---:|---|"
    for each in outcomes:
        yield f"| {each.kernel} | {each.cases} | {each.problem or 'equal'} |"


def compiled_table(results: Sequence[Compiled]) -> Iterator[str]:
    """Return a row per kernel and architecture, as Markdown."""
    yield "| kernel | dtypes | GPU | registers | spilled bytes | shared bytes | 16-byte loads | 16-byte stores |"
    yield "|---|---|---|---:|---:|---:|---:|---:|"
    for each in results:
        numbers = (each.registers, each.spilled_bytes, each.shared_bytes, each.vector_loads, each.vector_stores)
        yield f"| {each.kernel} | {each.dtypes} | sm_{each.architecture} | {' | '.join(map(str, numbers))} |"


def traffic_table(variants: Sequence[Variant]) -> Iterator[str]:
    """Return bytes per element, and the least time that they take at the bandwidth of the memory, as Markdown."""
    yield f"| kernel | dtypes | bytes per element | least ms on {', '.join(BANDWIDTHS)} at d = {EXAMPLE:,} |"
    yield "|---|---|---|---|"
    for each in variants:
        least = [f"{1e3 * each.element_bytes * EXAMPLE / rate:.3f}" for rate in BANDWIDTHS.values()]
        yield f"| {each.kernel} | {each.dtypes} | {each.traffic} | {', '.join(least) if each.element_bytes else '-'} |"
