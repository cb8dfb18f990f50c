"""The hot operations of a step; `micro.kernels.table` lists the implementations of each.

All implementations return the same indices and the same bits, except for sums that fits of thresholds use.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Timer
from types import ModuleType

import torch
from torch import Tensor

from micro.kernels import reference
from micro.kernels.code import Code
from micro.kernels.sums import Sums
from micro.kernels.table import compiled, forms, has_numba, module, on_gpu
from micro.values.finite import FirstBad

NOTE_S = 1.0  # of compiling, after which a user is told why the start takes so long
TRITON_NOTE_S = 5.0  # of loading or compiling

__all__ = [
    "above",
    "above_by_piece",
    "absorb_",
    "absorb_and_sum_",
    "add_at_",
    "added",
    "codes_for",
    "collect",
    "common",
    "compiled",
    "distinct",
    "first_distinct",
    "gather",
    "keep",
    "kth_by_run",
    "largest",
    "magnitude_counts",
    "on_gpu",
    "packing_on",
    "prepare",
    "ranked",
    "sums_above",
    "sums_of",
    "take_",
]

CPU = torch.device("cpu")
SPARSEST = 1 << 11  # elements of a vector for each of its indices, from which on they are sorted, not marked in a map


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
    return forms(x).gather(x, indices)


def add_at_(x: Tensor, indices: Tensor, values: Tensor, *, alpha: float = 1.0) -> None:
    """Add ``alpha`` times ``values`` (m,) to ``x`` (numel,) at ``indices`` (m,) int32."""
    if alpha == 1:
        forms(x, values).add_at_(x, indices, values)
    else:
        x.index_add_(0, indices, values.to(x.dtype), alpha=alpha)


def take_(x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Subtract ``values`` (m,) from ``x`` (numel,) at unique ``indices`` (m,) int32; return what was there."""
    return forms(x, values).take_(x, indices, values)


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


@cache
def prepare(device: torch.device = CPU) -> None:
    """Compile or load the forms that most steps use on a device, and check a GPU's, so that no step waits for it."""
    x = torch.ones(2, device=device)
    if not (compiled(x) or on_gpu(x)):
        return
    places = torch.zeros(1 << 13, dtype=torch.int32, device=device)
    with _noted(loops=compiled(x)):
        absorb_(x, torch.ones(2, device=device))
        absorb_and_sum_(x, torch.ones(2, device=device))
        sums_above(x, 0.5)
        above(x, 0.5)
        magnitude_counts(x, first_bit_pattern=0, shift=20, num_bins=1)
        largest(x, 1)
        indices, magnitudes, _ = collect(x, 0, 1, 18)
        keep(indices, magnitudes, 1, 1, 2, 0)
        distinct(places, 1)
        add_at_(x, places, gather(x, places))


@contextmanager
def _noted(*, loops: bool) -> Iterator[None]:
    """Say why the start takes long where loops are compiled for some time: on stderr, by one rank of a machine.

    numba says when it compiles. Triton does not before it has: of its kernels only the time tells.
    """
    words = "micro compiles its loops for some seconds: once on this machine"
    note = Timer(NOTE_S if loops else TRITON_NOTE_S, lambda: print(words, file=sys.stderr, flush=True))
    note.daemon = True
    begin = cache(note.start)  # a timer starts once
    try:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            yield
        elif loops:
            with module("jit").when_compiling(begin):
                yield
        else:
            begin()
            yield
    finally:
        note.cancel()
