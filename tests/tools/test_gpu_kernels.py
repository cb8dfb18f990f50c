"""`experiments.bench gpu`: the kernels are checked and compiled, on a machine with or without a GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from experiments.benchmarks.compiled_kernels import Compiled
from experiments.benchmarks.gpu import SOUND, faults
from experiments.benchmarks.kernel_checks import CHECKS, Outcome
from experiments.studies.methods import known_methods

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(
    not find_spec("triton"), reason="triton is not installed: torch's wheels for CUDA bring it"
)
CODES = (
    *("half", "bfloat16", "natural", "natural, published", "int8", "int8, stochastic", "qsgd, 2 bits", "qsgd, 4 bits"),
    *("qsgd, 8 bits", "qsgd, published", "terngrad", "terngrad, published", "sign", "onebit"),
)
pytestmark = pytest.mark.timeout(600)  # the report takes half a minute of a core
NARROW = ("terngrad, packing",)  # five bytes become one
PUBLISHED = ROOT / "results/published/gpu_kernels.md"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of the report of a process of its own: in this one Triton may interpret."""
    out = tmp_path_factory.mktemp("gpu")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(out / "cache")
    command = [sys.executable, "-m", "experiments.bench", "gpu", "--numel", "1000000", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return (out / "gpu.md").read_text().splitlines()


def rows(lines: list[str], heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading."""
    start = next(i for i, line in enumerate(lines) if line.startswith(f"## {heading}")) + 4
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:end]]


@needs_triton
def test_all_kernels_are_equal_to_the_reference(report: list[str]) -> None:
    assert SOUND in report
    assert [(row[0], row[2]) for row in rows(report, "Against the reference")] == [
        (name, "equal") for name in [*CHECKS, *CODES]
    ]


@needs_triton
def test_all_kernels_compile_without_spills_and_with_wide_loads(report: list[str]) -> None:
    found = rows(report, "Compiled ahead of time")
    assert {row[2] for row in found} == {"sm_80", "sm_90", "sm_100"}
    for name, _, _, registers, spilled, shared, loads, stores in found:
        assert 0 < int(registers) <= 128, name  # 16 warps of a multiprocessor at least
        assert int(spilled) == 0, name
        assert int(shared) <= 48 * 1024, name
        assert int(loads) > 0 or name in NARROW or name.endswith("mean"), name
        assert int(stores) > 0 or not (name.startswith("absorb") or name.endswith(("mean", "left"))), name


@needs_triton
def test_the_published_table_names_the_same_kernels_and_bytes(report: list[str]) -> None:
    published = PUBLISHED.read_text().splitlines()
    assert rows(published, "Bytes that each kernel moves") == rows(report, "Bytes that each kernel moves")
    kernels = [[row[:3] for row in rows(lines, "Compiled ahead of time")] for lines in (published, report)]
    assert kernels[0] == kernels[1]


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_report_has_bandwidths_and_collecting_needs_no_read_by_the_host(report: list[str]) -> None:
    assert any(line.startswith("## Against the reference, on the device") for line in report)
    assert len(rows(report, "Bandwidth")) == 8
    waits = {name: (number, captured) for name, number, captured in rows(report, "Reads by the host")}
    assert waits["absorb and collect"] == waits["scatter"] == ("0", "yes")


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_all_methods_take_a_step_and_that_of_fixed_messages_is_captured(report: list[str]) -> None:
    steps = {name.strip("`"): cells for name, *cells in rows(report, "Steps of one rank")}
    assert steps.keys() == {"dense", *known_methods()}
    assert [name for name, cells in steps.items() if cells[0] == "-"] == []
    assert steps["micro_fixed"][2:] == ["0", "yes"]


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: with one nothing travels over NCCL")
def test_on_two_gpus_all_methods_take_a_step_over_nccl(report: list[str]) -> None:
    steps = {name.strip("`"): cells for name, *cells in rows(report, "Steps over NCCL")}
    assert steps.keys() == set(known_methods())
    assert {name: cells[-1] for name, cells in steps.items() if cells[1] == "-"} == {}


def test_what_is_wrong_or_badly_compiled_is_named() -> None:
    good = Compiled("scatter", "float32", 90, 40, 0, 0, 2, 0)
    spilled = Compiled("absorb", "float32", 90, 255, 8, 0, 4, 4)
    narrow = Compiled("absorb", "float32", 90, 40, 0, 0, 4, 0, wants_stores=True)
    assert faults([Outcome("absorb", 20, "")], [good]) == [SOUND]
    found = faults([Outcome("absorb", 20, "(17, float32): differs")], [good, spilled, narrow])
    assert [line.split(":")[0] for line in found] == ["WRONG", "BADLY COMPILED", "BADLY COMPILED"]
