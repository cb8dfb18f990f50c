"""The hot operations of a step, and the table of their implementations, from which `forms` chooses for given tensors.

numba loops run on float32 vectors on a CPU, Triton kernels on vectors on NVIDIA GPUs, and plain torch on everything
else; numba and triton are imported on first use. All implementations return the same indices and the same bits, except
for sums that fits of thresholds use.
"""

from collections.abc import Sequence
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from micro.kernels import reference
from micro.kernels.code import Code
from micro.kernels.importing import import_form
from micro.kernels.sums import Sums
from micro.values.finite import FirstBad
from micro.warn import warn

FEWEST = 1 << 13  # entries from which a loop saves more time than its call takes
SPARSEST = 1 << 11  # elements of a vector for each of its indices, from which on they are sorted, not marked in a map


class Forms(NamedTuple):
    """The modules of micro.kernels that hold an operation's forms; None where there is no such form."""

    torch: str = "reference"
    numba: str | None = None
    triton: str | None = None


TABLE = {
    "absorb_": Forms(numba="cpu", triton="triton.absorbing"),
    "absorb_and_sum_": Forms(numba="summing", triton="triton.summing"),
    "above": Forms(numba="cpu", triton="triton.scanning"),
    "above_by_piece": Forms(numba="by_piece"),
    "kth_by_run": Forms(numba="by_piece"),
    "magnitude_counts": Forms(numba="cpu"),
    "largest": Forms(numba="lists", triton="triton.scanning"),
    "first_distinct": Forms(numba="lists"),
    "gather": Forms(numba="lists"),
    "add_at_": Forms(numba="lists"),
    "added": Forms(numba="lists"),
    "common": Forms(numba="lists"),
    "collect": Forms(numba="cpu"),
    "keep": Forms(numba="cpu"),
    "sums": Forms(numba="summing", triton="triton.summing"),
}
COUNTED = {"counted_above": Forms(triton="triton.scanning")}  # `above`, whose host reads the length later
PACKAGES = ("numba", "llvmlite", "numpy", "triton")  # of the compiled forms; each may be missing
TRIED = ("triton", "numba")  # forms; tests leave all to plain torch by an empty tuple


def absorb_(residual: Tensor, grad: Tensor) -> FirstBad:
    """Add ``grad`` (numel,) to ``residual`` (numel,) and set it to zero, in one pass over both.

    The residual stays finite, and so do sums of as many residuals as there may be ranks. A NaN or Inf of the gradient
    is left out; zero is kept where a sum reaches the largest number times 2^-28, which is 2^100 in single precision.

    Returns:
        the index of the first sum that is not finite or that large, None where there is none. On an accelerator the
        index stays there: (1,) int32, numel where there is none.

    Raises:
        ValueError: the vectors differ in length; numba's loops themselves do not look.
    """
    _check_length(residual, grad)
    return forms(residual, grad).absorb_(residual, grad)


def absorb_and_sum_(residual: Tensor, grad: Tensor) -> tuple[FirstBad, Sums]:
    """Do what `absorb_` does, in the same pass; return what it returns, and the sums of the new residual."""
    _check_length(residual, grad)
    first_bad, found = forms(residual, grad).absorb_and_sum_(residual, grad)
    return first_bad, Sums(*found)


def _check_length(residual: Tensor, grad: Tensor) -> None:
    if residual.numel() != grad.numel():
        raise ValueError(f"gradient must have the residual's {residual.numel()} elements, got {grad.numel()}")


def above(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the ascending indices (k,) int32 of ``x`` (numel,) with abs(x) >= threshold, never of NaN, and magnitudes.

    The threshold is rounded to the dtype of ``x`` first, as torch does when it compares a tensor with a number.
    """
    return forms(x).above(x, threshold)


def above_by_piece(x: Tensor, pieces: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `above` does, with a threshold for each of S pieces, in one scan of these alone.

    Args:
        pieces: (S, 2) int64 starts and stops, ascending, not overlapping.
        thresholds: (S,) rounded to the dtype of ``x`` first.
    """
    return forms(x).above_by_piece(x, pieces, thresholds)


def kth_by_run(magnitudes: Tensor, lengths: Tensor, ranks: Tensor) -> Tensor:
    """Return the ``ranks[s]``-th largest (S,) of ``magnitudes`` (m,) in each of S neighbouring runs.

    Args:
        lengths: (S,) int64, m in sum.
        ranks: (S,) int64 from 1; infinity is returned for ranks below, 0 for ranks beyond a run's length.
    """
    return forms(magnitudes).kth_by_run(magnitudes, lengths, ranks)


def magnitude_counts(x: Tensor, *, first_bit_pattern: int, shift: int, num_bins: int) -> Tensor:
    """Return (num_bins,) int32 counts of the magnitudes of ``x`` (numel,) by ranges of their float32 bit patterns.

    Bin b counts patterns from ``first_bit_pattern + (b << shift)`` on, ``1 << shift`` of them; what lies outside of all
    bins, zeros, NaN and infinity are not counted.
    """
    return forms(x).magnitude_counts(x, first_bit_pattern, shift, num_bins)


def largest(x: Tensor, k: int) -> Tensor:
    """Return the ascending (min(k, numel),) int32 indices of the k largest magnitudes; ties go to the lowest index.

    Exact. Of long vectors a sample estimates the k-th magnitude, one scan collects what is above the estimate, and
    top-k runs on those few.
    """
    return forms(x).largest(x, k) if 0 < k < x.numel() else reference.largest(x, k)


def ranked(x: Tensor, ranks: Sequence[int]) -> Tensor:
    """Return the magnitudes (R,) that come at these ranks, from 1 to numel, among those of ``x`` (numel,)."""
    falling = torch.topk(x.abs(), max(ranks)).values
    return torch.stack([falling[rank - 1] for rank in ranks])


def collect(x: Tensor, start: int, lowest: int, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what of a slice ``x`` (numel,) reaches the magnitude with the bits ``lowest``; see `reference`.

    Args:
        start: of the slice in the vector.

    Returns:
        ascending indices in the vector (m,) int32, magnitudes (m,) float32, counts by bin (NUM_BINS,) int32.
    """
    return forms(x).collect(x, start, lowest, shift)


def keep(indices: Tensor, magnitudes: Tensor, count: int, bottom: int, top: int, share: int) -> Tensor:
    """Return the ascending ``indices`` (m,) of the candidates from ``top`` on, and of the largest between.

    Of equal magnitudes the lowest index is kept.

    Args:
        magnitudes: (m,) float32 of the candidates.
        count: how many are kept in all.
        bottom, top: bits of the magnitudes between which only ``share`` of the candidates are kept.
    """
    return forms(magnitudes).keep(indices, magnitudes, count, bottom, top, share)


def distinct(indices: Tensor, numel: int) -> Tensor:
    """Return the ascending indices that ``indices`` (m,), int32 or int64 in [0, numel), hold, each of them once."""
    return first_distinct(indices, numel, indices.numel())


def first_distinct(indices: Tensor, numel: int, k: int) -> Tensor:
    """Return, in ascending order, the first k that differ of ``indices`` (m,), int32 or int64 in [0, numel).

    Fewer where ``indices`` does not hold as many.
    """
    is_dense = indices.numel() * SPARSEST > numel and indices.is_contiguous()
    loops = module("lists") if is_dense and indices.is_cpu and has_numba() else reference
    return loops.first_distinct(indices, numel, k)


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Return ``x`` (numel,) at ``indices`` (m,) int32."""
    return x.index_select(0, indices) if indices.numel() < FEWEST else forms(x).gather(x, indices)


def add_at_(x: Tensor, indices: Tensor, values: Tensor, *, alpha: float = 1.0) -> None:
    """Add ``alpha`` times ``values`` (m,) to ``x`` (numel,) at ``indices`` (m,) int32."""
    if indices.numel() < FEWEST:
        x.index_add_(0, indices, values.to(x.dtype), alpha=alpha)
    else:
        forms(x, values).add_at_(x, indices, values, alpha)


def added(indices: Tensor, values: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the union (m,) int32 of lists of indices and the sums (m,) of their values, added in the order given.

    Args:
        indices, values: (sum(counts),) the entries of one list after the other; a list has an index only once.
    """
    return forms(values).added(indices, values, counts)


def common(indices: Tensor, values: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries (indices and values) whose indices are in ``among`` (K,) too, which ascend."""
    return forms(values).common(indices, values, among)


def sums_of(x: Tensor) -> Sums:
    """Return the sums of ``x`` (numel,)."""
    return sums_above(x, -1.0)


def sums_above(x: Tensor, floor: float) -> Sums:
    """Return the sums of those of ``x`` (numel,) whose magnitude is larger than ``floor``, rounded to its dtype."""
    return Sums(*forms(x).sums(x, floor))


def codes_for(code: Code | None, *values: Tensor) -> ModuleType | None:
    """Return the module of numba's codes where it serves this code and all of these tensors, else None."""
    if code is None or not all(map(compiled, values)):
        return None
    loops = module("codes")
    return loops if loops.serves(code) else None


def packing_on(device: torch.device) -> ModuleType | None:
    """Return the module of numba's packing where whole numbers on ``device`` are packed by it, else None."""
    return module("packing") if device.type == "cpu" and has_numba() else None


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
