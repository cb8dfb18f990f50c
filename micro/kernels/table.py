"""The table of all implementations of the hot operations; `forms` chooses one for given tensors.

numba loops run on float32 vectors on a CPU, Triton kernels on vectors on NVIDIA GPUs, and plain torch on everything
else. numba and triton are imported on first use.
"""

from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from micro.kernels.importing import import_form
from micro.warn import warn


class Forms(NamedTuple):
    """The modules of micro.kernels that hold an operation's forms; None where there is no such form."""

    torch: str = "reference"
    numba: str | None = None
    triton: str | None = None


TABLE = {
    "absorb_": Forms(numba="cpu", triton="triton.absorbing"),
    "absorb_and_sum_": Forms(numba="summing", triton="triton.summing"),
    "above": Forms(numba="cpu", triton="triton.scanning"),
    "above_by_piece": Forms(numba="cpu"),
    "kth_by_run": Forms(numba="cpu"),
    "magnitude_counts": Forms(numba="cpu"),
    "largest": Forms(numba="lists", triton="triton.scanning"),
    "first_distinct": Forms(numba="lists"),
    "gather": Forms(numba="lists"),
    "add_at_": Forms(numba="lists"),
    "take_": Forms(numba="lists"),
    "added": Forms(numba="lists"),
    "common": Forms(numba="lists"),
    "collect": Forms(numba="cpu"),
    "keep": Forms(numba="cpu"),
    "sums": Forms(numba="summing", triton="triton.summing"),
}
COUNTED = {"counted_above": Forms(triton="triton.scanning")}  # `above`, whose host reads the length later
PACKAGES = ("numba", "llvmlite", "numpy", "triton")  # of the compiled forms; each may be missing
TRIED = ("triton", "numba")  # forms; tests leave all to plain torch by an empty tuple


def forms(*vectors: Tensor) -> Any:
    """Return the operations that serve these vectors, each as an attribute: Triton's, numba's, else plain torch's."""
    for x in vectors:
        if not (x.is_cpu and x.dtype is torch.float32 and x.is_contiguous()):
            break
    else:
        if "numba" in TRIED and _is_there("cpu"):
            return _operations("numba")
    return _operations("triton" if "triton" in TRIED and on_gpu(*vectors) else "torch")


@cache
def _operations(kind: str) -> SimpleNamespace:
    """Return every operation in the form of a kind, else in torch."""
    rows = (TABLE | COUNTED).items()
    return SimpleNamespace(**{name: getattr(module(getattr(row, kind) or row.torch), name) for name, row in rows})


@cache
def module(name: str) -> ModuleType:
    """Return a module of micro.kernels."""
    return import_form(name)


def compiled(x: Tensor) -> bool:
    """Tell whether numba's loops serve this tensor (float32, contiguous, on a CPU, numba installed)."""
    return x.is_cpu and x.dtype is torch.float32 and x.is_contiguous() and has_numba()


def has_numba() -> bool:
    """Tell whether numba's loops can be used."""
    return "numba" in TRIED and _is_there("cpu")


def on_gpu(*tensors: Tensor) -> bool:
    """Tell whether Triton's kernels serve these tensors (contiguous, on an NVIDIA GPU of capability 8.0 or more)."""
    if not all(_is_gpu(x.device) for x in tensors) or not _is_there("triton.launching"):
        return False
    return bool(module("triton.launching").takes(*tensors)) and all(_runs(x.device) for x in tensors)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None


@cache
def _is_there(name: str) -> bool:
    """Tell whether a module can be imported; warn where the package that it needs is there and fails."""
    try:
        module(name)
    except Exception as error:  # whatever a package raises that does not fit this Python, numpy or program
        if not (isinstance(error, ModuleNotFoundError) and error.name in PACKAGES):
            package = "triton" if name.startswith("triton.") else "numba"
            warn(
                f"torch does the work of micro's compiled loops, for the import of {package} fails "
                f"({type(error).__name__}: {error}): repair it, or uninstall it"
            )
        return False
    return True


@cache
def _runs(device: torch.device) -> bool:
    """Tell whether a kernel runs on this device, which needs a C compiler, for one, and gives what torch gives."""
    try:
        module("triton.checking").check(device)
    except Exception as error:  # whatever Triton, the driver or the C compiler raise
        warn(f"torch does the work of micro's kernels on {device}, where they do not run: {error}")
        return False
    return True
