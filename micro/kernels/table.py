"""One table says which forms every hot operation has, and one function which of them serves a tensor.

numba's loops serve float32 vectors on a CPU, Triton's kernels vectors on NVIDIA's GPUs, and plain torch all else.
numba and triton are imported when a form is first used.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Forms(NamedTuple):
    """The modules of micro.kernels that hold an operation's forms; None where there is no such form."""

    torch: str | None = "reference"
    numba: str | None = None
    triton: str | None = None


TABLE = {
    "absorb_": Forms(numba="absorbing", triton="triton.absorbing"),
    "absorb_and_sum_": Forms(numba="summing", triton="triton.summing"),
    "absorb_with_momentum_": Forms(None, numba="absorbing"),  # in torch: micro.feedback
    "above": Forms(numba="scanning", triton="triton.scanning"),
    "above_by_piece": Forms(numba="scanning"),
    "kth_by_run": Forms(numba="scanning"),
    "magnitude_counts": Forms(numba="scanning", triton="triton.scanning"),
    "largest": Forms(numba="choosing", triton="triton.scanning"),
    "largest_of_each": Forms(None, numba="near_pieces"),  # in torch: micro.selectors.pieces
    "ranked": Forms(numba="choosing"),
    "first_distinct": Forms(numba="choosing"),
    "gather": Forms(numba="entries"),
    "add_at_": Forms(numba="entries"),
    "take_": Forms(numba="entries"),
    "added": Forms(numba="merging"),
    "common": Forms(numba="merging"),
    "sums": Forms(numba="summing", triton="triton.summing"),
    "squares_by_piece": Forms(numba="squares"),
}
FAMILIES = {  # of which callers take the whole module
    "cuts": Forms("cuts_reference", numba="cuts"),
    "codes": Forms(None, numba="codes", triton="triton.codes"),  # in torch: micro.codecs
    "packing": Forms(None, numba="packing"),  # in torch: micro.codecs.bits
}
TRIED = ("triton", "numba")  # forms; tests leave all to plain torch by an empty tuple


def form(operation: str, *vectors: Tensor) -> Callable[..., Any]:
    """Return the form of an operation that serves these vectors: Triton's, numba's, else the one in plain torch."""
    return function(_module_name(TABLE[operation], vectors) or "reference", operation)


def family(name: str, *vectors: Tensor) -> ModuleType | None:
    """Return the module of a family that serves these vectors; None where it has none."""
    module_name = _module_name(FAMILIES[name], vectors)
    return module(module_name) if module_name else None


def _module_name(forms: Forms, vectors: Sequence[Tensor]) -> str | None:
    if forms.triton and on_gpu(*vectors):
        return forms.triton
    return forms.numba if forms.numba and all(map(compiled, vectors)) else forms.torch


def function(module_name: str, operation: str) -> Callable[..., Any]:
    """Return an operation as a module of micro.kernels has it."""
    found: Callable[..., Any] = getattr(module(module_name), operation)
    return found


@cache
def module(name: str) -> ModuleType:
    """Return a module of micro.kernels."""
    return import_module(f"micro.kernels.{name}")


def compiled(x: Tensor) -> bool:
    """Tell whether numba's loops serve this tensor (float32, contiguous, on a CPU, numba installed)."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() and has_numba()


def has_numba() -> bool:
    """Tell whether numba's loops can be used."""
    return "numba" in TRIED and _is_there("scanning")


def is_served(device: torch.device) -> bool:
    """Tell whether numba's loops or Triton's kernels are to serve tensors on this device."""
    return ("triton" in TRIED and _is_gpu(device)) or (device.type == "cpu" and has_numba())


def on_gpu(*tensors: Tensor) -> bool:
    """Tell whether Triton's kernels serve these tensors (contiguous, on an NVIDIA GPU of capability 8.0 or more)."""
    if "triton" not in TRIED or not all(_is_gpu(x.device) for x in tensors) or not _is_there("triton.launching"):
        return False
    return bool(function("triton.launching", "takes")(*tensors)) and all(_runs(x.device) for x in tensors)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None


@cache
def _is_there(name: str) -> bool:
    """Tell whether a module can be imported: numba, and triton, which torch's wheels for CUDA bring, may be missing."""
    try:
        module(name)
    except ImportError:
        return False
    return True


@cache
def _runs(device: torch.device) -> bool:
    """Tell whether a kernel runs on this device, which needs a C compiler, for one, and gives what torch gives."""
    try:
        function("triton.checking", "check")(device)
    except Exception as error:  # whatever Triton, the driver or the C compiler raise
        warnings.warn(
            f"torch does the work of micro's kernels on {device}, where they do not run: {error}", stacklevel=2
        )
        return False
    return True
