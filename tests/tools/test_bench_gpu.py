"""`experiments.bench gpu`: kernels are compiled, failures reported. Its parts are in tests/dist/test_benchmarks.py."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from experiments.tools.bench.gpu.command import SOUND, rows_of
from experiments.tools.bench.gpu.parts import PARTS
from experiments.tools.bench.gpu.training import Settings

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)  # the report takes half a minute of a core
needs_triton = pytest.mark.skipif(
    not find_spec("triton"), reason="triton is not installed: torch's wheels for CUDA bring it"
)


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
    words = ["--device", "cpu", "--parts", "kernels,compiled", "--out", str(out)]
    not_interpreted(out, "-m", "experiments.bench", "gpu", *words)
    return (out / "gpu.md").read_text().splitlines()


def rows(lines: list[str], heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading."""
    start = next(i for i, line in enumerate(lines) if line.startswith(f"## {heading}")) + 4
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:end]]


@needs_triton
def test_all_kernels_compile_without_spills_and_with_wide_loads(report: list[str]) -> None:
    assert SOUND in report
    assert "no card" in report
    found = rows(report, "Compiled ahead of time")
    assert {row[2] for row in found} == {"sm_80", "sm_90", "sm_100"}
    for name, _, _, registers, spilled, shared, loads, stores, *_ in found:
        assert 0 < int(registers) <= 128, name  # 16 warps of a multiprocessor at least
        assert int(spilled) == 0, name
        assert int(shared) <= 48 * 1024, name
        assert int(loads) > 0, name
        assert int(stores) > 0 or not name.startswith("absorb"), name


BIND = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from experiments.tools.bench.gpu.variants import variants
from micro.kernels.triton.launching import LENGTHS

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "i32": torch.int32}
for variant in variants():
    function = variant.function
    bind = create_function_from_signature(function.signature, function.params, make_backend(GPUTarget("cuda", 90, 32)))
    types = dict(word.split(":") for word in variant.types.split())
    fixed = {name: torch.empty(16, dtype=DTYPES[kind[1:]]) for name, kind in types.items() if kind[0] == "*"}

    def bound(numel):
        given = {**variant.constants, **fixed, "numel": numel}
        return str(bind(**{name: given[name] for name in function.arg_names})[1])

    print(len({bound(numel) for numel in LENGTHS[:50]}))
"""


@needs_triton
def test_fifty_lengths_compile_a_kernel_twice(tmp_path: Path) -> None:
    """Multiples of 16, which are loaded 16 bytes at a time, and others; no kernel takes another number."""
    assert set(not_interpreted(tmp_path, "-c", BIND).splitlines()) == {"2"}


def test_a_call_that_fails_is_a_row_that_says_so_and_the_others_go_on() -> None:
    part = PARTS["methods"]._replace(names=("topk", "unknown", "topk"))
    first, failed, last = rows_of(part, Settings(device="cpu", numel=2000, methods=()))
    assert first == last
    assert first["name"] == "topk"
    assert failed["name"] == "unknown"
    assert "unknown" in failed["problem"]


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_all_parts_run_and_nothing_is_wrong(tmp_path: Path) -> None:
    words = ["--numel", "1000000", "--methods", "micro,topk,oktopk,int8", "--out", str(tmp_path)]
    not_interpreted(tmp_path, "-m", "experiments.bench", "gpu", *words)  # ends with 1 where something is
    assert SOUND in (tmp_path / "gpu.md").read_text()
