"""What importing the package costs, and what it offers."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(source: str) -> str:
    """Return what a fresh interpreter prints."""
    ran = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_importing_micro_loads_neither_numba_nor_the_planner() -> None:
    late = "numba", "llvmlite", "triton", "micro.kernels.cpu", "micro.planning", "importlib.metadata", "statistics"
    source = f"import torch, sys; before = set(sys.modules); import micro; print({late} & (set(sys.modules) - before))"
    assert python(source.replace(str(late), str(set(late)))) == "set()"


def test_the_first_kernel_loads_numba() -> None:
    source = (
        "import sys, torch; from micro import kernels; before = 'numba' in sys.modules; "
        "kernels.above(torch.ones(3), 0.5); print(before, kernels.compiled(torch.ones(3)) == ('numba' in sys.modules))"
    )
    assert python(source) == "False True"
