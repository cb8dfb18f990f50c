"""`experiments.bench gpu`: kernels are checked and compiled, and what measures on a GPU is tried with stand-ins."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments.benchmarks.gpu.command import SOUND, faults
from experiments.studies.methods import known_methods

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)  # the report takes half a minute of a core
needs_triton = pytest.mark.skipif(
    not find_spec("triton"), reason="triton is not installed: torch's wheels for CUDA bring it"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def not_interpreted(out: Path, *arguments: str) -> str:
    """Return what a Python process of its own writes: in this one Triton may interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(out / "cache")
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of the report."""
    out = tmp_path_factory.mktemp("gpu")
    not_interpreted(out, "-m", "experiments.bench", "gpu", "--numel", "1000000", "--out", str(out))
    return (out / "gpu.md").read_text().splitlines()


def rows(lines: list[str], heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading."""
    start = next(i for i, line in enumerate(lines) if line.startswith(f"## {heading}")) + 4
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:end]]


@needs_triton
def test_all_kernels_compile_without_spills_and_with_wide_loads(report: list[str]) -> None:
    assert SOUND in report
    found = rows(report, "Compiled ahead of time")
    assert {row[2] for row in found} == {"sm_80", "sm_90", "sm_100"}
    for name, _, _, registers, spilled, shared, loads, stores in found:
        assert 0 < int(registers) <= 128, name  # 16 warps of a multiprocessor at least
        assert int(spilled) == 0, name
        assert int(shared) <= 48 * 1024, name
        assert int(loads) > 0 or name.endswith("mean"), name
        assert int(stores) > 0 or not (name.startswith("absorb") or name.endswith(("mean", "left"))), name


BIND = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from experiments.benchmarks.gpu.variants import variants

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "i32": torch.int32, "i16": torch.int16,
          "i8": torch.int8, "u8": torch.uint8}
for variant in variants():
    function = variant.function
    bind = create_function_from_signature(function.signature, function.params, make_backend(GPUTarget("cuda", 90, 32)))
    types = dict(word.split(":") for word in variant.types.split())
    fixed = {name: torch.empty(16, dtype=DTYPES[kind[1:]]) for name, kind in types.items() if kind[0] == "*"}

    def bound(step, numel):
        numbers = {name: float(step) if types[name] == "fp32" else step for name in types if name not in fixed}
        given = {**variant.constants, **fixed, **numbers, "numel": numel}
        return str(bind(**{name: given[name] for name in function.arg_names})[1])

    print(len({bound(step, 4096) for step in range(50)}), len({bound(1, numel) for numel in range(1, 50)}))
"""


@needs_triton
def test_fifty_steps_compile_a_kernel_once_and_lengths_twice_more(tmp_path: Path) -> None:
    """Lengths alone are told apart: 1, multiples of 16, which are loaded 16 bytes at a time, and others."""
    assert set(not_interpreted(tmp_path, "-c", BIND).splitlines()) == {"1 3"}


@needs_triton
@needs_gpu
@pytest.mark.gpu
def test_on_a_gpu_kernels_are_checked_and_all_methods_take_a_step(report: list[str]) -> None:
    assert {result for _, result in rows(report, "Against torch")} == {"equal"}
    kernels = {name: cells for name, *cells in rows(report, "Kernels at")}
    assert len(kernels) == 6
    steps = {name: cells for name, *cells in rows(report, "Steps on 1")}
    assert steps.keys() == set(known_methods())
    assert {name: cells[-1] for name, cells in steps.items() if cells[-1]} == {}


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: with one nothing travels over NCCL")
def test_on_several_gpus_all_methods_take_a_step_over_nccl(report: list[str]) -> None:
    steps = rows(report, f"Steps on {torch.cuda.device_count()}")
    assert {cells[0] for cells in steps} == set(known_methods())
    assert [cells for cells in steps if cells[-1]] == []


def test_what_is_wrong_or_badly_compiled_is_named() -> None:
    frame = pd.DataFrame({"kernel": ["above", "absorb"], "gpu": ["sm_90", "sm_90"], "is_sound": [True, True]})
    assert faults({"kernels of methods": ""}, frame) == [SOUND]
    found = faults({"kernels of methods": "the scan"}, frame.assign(is_sound=[True, False]))
    assert len(found) == 2
    assert "the scan" in found[0]
    assert "absorb" in found[1]
