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


@needs_triton
@needs_gpu
@pytest.mark.gpu
def test_on_gpus_kernels_are_checked_and_all_methods_take_a_step(report: list[str]) -> None:
    """With several, over NCCL too."""
    assert {result for _, result in rows(report, "Against torch")} == {"equal"}
    assert len(rows(report, "Kernels at")) == 6
    for number in {1, torch.cuda.device_count()}:
        steps = rows(report, f"Steps on {number}")
        assert {cells[0] for cells in steps} == set(known_methods())
        assert [cells for cells in steps if cells[-1]] == []


def test_what_is_wrong_or_badly_compiled_is_named() -> None:
    frame = pd.DataFrame({"kernel": ["above", "absorb"], "gpu": ["sm_90", "sm_90"], "is_sound": [True, True]})
    assert faults({"kernels of methods": ""}, frame) == [SOUND]
    found = faults({"kernels of methods": "the scan"}, frame.assign(is_sound=[True, False]))
    assert len(found) == 2
    assert "the scan" in found[0]
    assert "absorb" in found[1]
