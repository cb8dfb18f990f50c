"""The hot operations of a step; `micro.kernels.table` says which forms each has.

All forms give the same indices and, but for sums that thresholds are fitted to, the same bits.
"""

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from micro.health import FirstBad
from micro.kernels import reference
from micro.kernels.code import Code
from micro.kernels.sums import Sums
from micro.kernels.table import compiled, family, form, function, has_numba, is_served, module, on_gpu

__all__ = [
    "above",
    "above_by_piece",
    "above_with_magnitudes",
    "absorb_",
    "absorb_and_sum_",
    "add_at_",
    "added",
    "codes_for",
    "common",
    "compiled",
    "cuts_for",
    "distinct",
    "family",
    "first_distinct",
    "form",
    "gather",
    "has_numba",
    "is_served",
    "kth_by_run",
    "largest",
    "largest_of_each",
    "magnitude_counts",
    "momentum_form",
    "on_gpu",
    "packing_on",
    "prepare",
    "ranked",
    "squares_by_piece",
    "sums_above",
    "sums_of",
    "take_",
]

CPU = torch.device("cpu")
MOST_MERGED = 64  # lists that are merged one after the other
LONGEST_NEAR = 1 << 15  # elements of a piece that stays in a core's caches with what is found in it
SPARSEST = 1 << 11  # elements of a vector for each of its indices, from which on they are sorted, not marked in a map
FEWEST = 8192  # entries from which a loop saves more time than its call takes


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
    if residual.numel() != grad.numel():
        raise ValueError(f"gradient must have the residual's {residual.numel()} elements, got {grad.numel()}")
    is_narrow = grad.dtype in (torch.bfloat16, torch.float16) and grad.device.type == "cpu" and grad.is_contiguous()
    vectors = (residual,) if is_narrow and compiled(residual) else (residual, grad)
    first_bad: FirstBad = form("absorb_", *vectors)(residual, grad)
    return first_bad


def absorb_and_sum_(residual: Tensor, grad: Tensor) -> tuple[FirstBad, Sums]:
    """Do what `absorb_` does, in the same pass; return what it returns, and the sums of the new residual."""
    if residual.numel() != grad.numel():
        raise ValueError(f"gradient must have the residual's {residual.numel()} elements, got {grad.numel()}")
    first_bad, found = form("absorb_and_sum_", residual, grad)(residual, grad)
    return first_bad, Sums(*found)


def momentum_form(*vectors: Tensor) -> Callable[..., int | None] | None:
    """Return numba's pass of momentum correction over residual, momentum and gradient; None where torch does it."""
    return form("absorb_with_momentum_", *vectors) if all(map(compiled, vectors)) else None


def above(x: Tensor, threshold: float) -> Tensor:
    """Return the ascending (k,) int32 indices of ``x`` (numel,) with abs(x) >= threshold; NaN is never among them.

    The threshold is rounded to the dtype of ``x`` first, as torch does when it compares a tensor with a number.
    """
    return above_with_magnitudes(x, threshold)[0]


def above_with_magnitudes(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return what `above` returns, and the magnitudes (k,) of those elements, in one scan."""
    indices, magnitudes = form("above", x)(x, threshold)
    return indices, magnitudes


def above_by_piece(x: Tensor, pieces: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `above_with_magnitudes` does, with a threshold for each of S pieces, in one scan of these alone.

    Args:
        pieces: (S, 2) int64 starts and stops, ascending, not overlapping.
        thresholds: (S,) rounded to the dtype of ``x`` first.
    """
    indices, magnitudes = form("above_by_piece", x)(x, pieces, thresholds)
    return indices, magnitudes


def kth_by_run(magnitudes: Tensor, lengths: Tensor, ranks: Tensor) -> Tensor:
    """Return the ``ranks[s]``-th largest (S,) of ``magnitudes`` (m,) in each of S neighbouring runs.

    Args:
        lengths: (S,) int64, m in sum.
        ranks: (S,) int64 from 1; infinity is returned for ranks below, 0 for ranks beyond a run's length.
    """
    found: Tensor = form("kth_by_run", magnitudes)(magnitudes, lengths, ranks)
    return found


def magnitude_counts(x: Tensor, *, first_bit_pattern: int, shift: int, num_bins: int) -> Tensor:
    """Return (num_bins,) int32 counts of the magnitudes of ``x`` (numel,) by ranges of their float32 bit patterns.

    Bin b counts patterns from ``first_bit_pattern + (b << shift)`` on, ``1 << shift`` of them; what lies outside of all
    bins, zeros, NaN and infinity are not counted.
    """
    counts: Tensor = form("magnitude_counts", x)(x, first_bit_pattern, shift, num_bins)
    return counts


def largest(x: Tensor, k: int) -> Tensor:
    """Return the ascending (min(k, numel),) int32 indices of the k largest magnitudes; ties go to the lowest index.

    Exact. Of long vectors a sample estimates the k-th magnitude, one scan collects what is above the estimate, and
    top-k runs on those few.
    """
    indices: Tensor = (form("largest", x) if 0 < k < x.numel() else reference.largest)(x, k)
    return indices


def largest_of_each(x: Tensor, spans: Tensor, counts: Tensor, *, longest: int) -> Tensor | None:
    """Return the ascending int32 indices of the ``counts`` (S,) largest magnitudes of each of S short pieces.

    Exact; ties go to the lowest index. None where no loop serves them, or the ``longest`` piece would be read from
    memory more than once.

    Args:
        spans: (S, 2) int64 starts and stops, ascending, not overlapping.
        counts: (S,) int64, none more than the piece has.
    """
    if longest > LONGEST_NEAR or not compiled(x):
        return None
    indices: Tensor = form("largest_of_each", x)(x, spans, counts)
    return indices


def ranked(x: Tensor, ranks: Sequence[int]) -> Tensor:
    """Return the magnitudes (R,) that come at these ``ranks``, from 1 to numel, among those of ``x`` (numel,)."""
    found: Tensor = form("ranked", x)(x, ranks)
    return found


def distinct(indices: Tensor, numel: int) -> Tensor:
    """Return the ascending indices that ``indices`` (m,), int32 or int64 in [0, numel), hold, each of them once."""
    return first_distinct(indices, numel, indices.numel())


def first_distinct(indices: Tensor, numel: int, k: int) -> Tensor:
    """Return, in ascending order, the first k that differ of ``indices`` (m,), int32 or int64 in [0, numel).

    Fewer where ``indices`` does not hold as many.
    """
    is_dense = indices.numel() * SPARSEST > numel and indices.is_contiguous()
    is_marked = is_dense and indices.device.type == "cpu" and has_numba()
    found: Tensor = function("choosing" if is_marked else "reference", "first_distinct")(indices, numel, k)
    return found


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Return ``x`` (numel,) at ``indices`` (m,) int32."""
    found: Tensor = _at("gather", indices, x)(x, indices)
    return found


def add_at_(x: Tensor, indices: Tensor, values: Tensor, *, alpha: float = 1.0) -> None:
    """Add ``alpha`` times ``values`` (m,) to ``x`` (numel,) at ``indices`` (m,) int32."""
    if alpha == 1:
        _at("add_at_", indices, x, values)(x, indices, values)
    else:
        x.index_add_(0, indices, values.to(x.dtype), alpha=alpha)


def take_(x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Subtract ``values`` (m,) from ``x`` (numel,) at unique ``indices`` (m,) int32; return what was there."""
    before: Tensor = _at("take_", indices, x, values)(x, indices, values)
    return before


def _at(operation: str, indices: Tensor, *vectors: Tensor) -> Callable[..., Any]:
    """Return the form of an operation on entries, of which numba's is for many, with an int32 index for each value."""
    fits = indices.numel() >= FEWEST and all(values.numel() == indices.numel() for values in vectors[1:])
    return form(operation, *vectors) if fits and _are_lists(indices) else getattr(reference, operation)


def added(indices: Tensor, values: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the union (m,) int32 of lists of indices and the sums (m,) of their values, added in the order given.

    Args:
        indices, values: (sum(counts),) the entries of one list after the other; a list has an index only once.
    """
    fits = len(counts) <= MOST_MERGED and _are_lists(indices)
    merged = form("added", values)(indices, values, counts) if fits else None  # None where a list does not ascend
    return merged or reference.added(indices, values, counts)


def common(indices: Tensor, values: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries (indices and values) whose indices are in ``among`` (K,) too, which ascend."""
    found = form("common", values)(indices, values, among) if _are_lists(indices, among) else None
    return found or reference.common(indices, values, among)


def _are_lists(*indices: Tensor) -> bool:
    return all(part.device.type == "cpu" and part.dtype is torch.int32 and part.is_contiguous() for part in indices)


def sums_of(x: Tensor) -> Sums:
    """Return the sums of ``x`` (numel,)."""
    return sums_above(x, -1.0)


def sums_above(x: Tensor, floor: float) -> Sums:
    """Return the sums of those of ``x`` (numel,) whose magnitude is larger than ``floor``, rounded to its dtype."""
    return Sums(*form("sums", x)(x, floor))


def squares_by_piece(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the sums of squares (S,) float64 of neighbouring pieces of ``x`` (numel,), which have these lengths."""
    found: Tensor = form("squares_by_piece", x)(x, lengths)
    return found


def cuts_for(vector: Tensor) -> ModuleType:
    """Return the module that cuts a selection of this vector by counts: `cuts`, or `cuts_reference` in plain torch."""
    found = family("cuts", vector)
    assert found is not None  # there is one in torch
    return found


def codes_for(code: Code | None, *values: Tensor) -> ModuleType | None:
    """Return the module that has a compiled form of this code for these tensors, else None.

    It is `micro.kernels.codes`, in numba, or `micro.kernels.triton.codes`, which has the same names.
    """
    if code is None or not all(x.dtype == torch.float32 for x in values):
        return None
    loops = family("codes", *values)
    return loops if loops is not None and loops.serves(code) else None


def packing_on(device: torch.device) -> ModuleType | None:
    """Return the module of numba's packing where whole numbers on ``device`` are packed by it, else None."""
    return module("packing") if device.type == "cpu" and has_numba() else None


@cache
def prepare(device: torch.device = CPU) -> None:
    """Compile or load the forms that most steps use on a device, and check a GPU's, so that no step waits for it."""
    if not is_served(device):
        return
    x, places = torch.ones(2, device=device), torch.zeros(FEWEST, dtype=torch.int32, device=device)
    absorb_(x, torch.ones(2, device=device))
    absorb_and_sum_(x, torch.ones(2, device=device))
    sums_above(x, 0.5)
    ranked(x, [1])
    above(x, 0.5)
    magnitude_counts(x, first_bit_pattern=0, shift=20, num_bins=1)
    largest(x, 1)
    distinct(places, 1)
    add_at_(x, places, gather(x, places))
