"""The hot loops: accumulate, scan and compact, count by magnitude, and exact top-k on top of them.

On a CPU with numba installed the loops are compiled, on NVIDIA's GPUs Triton's kernels do the work; anywhere else the
pure-torch reference runs, and all give the same indices. numba and triton are imported when a loop first runs.
"""

import math
import warnings
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Protocol, cast

import torch
from torch import Tensor

from micro.kernels import reference

MOST_MERGED = 64  # lists that are merged one after the other
SAMPLE = 1 << 13  # enough for a few percent on the k-th magnitude; a wrong guess costs one more scan, never exactness
LONGEST_NEAR = 1 << 15  # elements of a piece that stays in a core's caches with what is found in it
SPARSEST = 1 << 11  # elements of a vector for each of its indices, from which on they are sorted, not marked in a map


class _Loops(Protocol):
    """What the compiled loops and the reference have in common; functions of this module say what they return."""

    def above(self, x: Tensor, threshold: float) -> tuple[Tensor, Tensor]: ...

    def above_by_piece(self, x: Tensor, pieces: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]: ...

    def kth_by_run(self, magnitudes: Tensor, lengths: Tensor, ranks: Tensor) -> Tensor: ...

    def absorb_(self, residual: Tensor, grad: Tensor) -> int | None: ...

    def magnitude_counts(self, x: Tensor, first_bit_pattern: int, shift: int, num_bins: int) -> Tensor: ...


class _CpuLoops(_Loops, Protocol):
    """What the compiled loops offer beyond that."""

    def absorb_(self, residual: Tensor, grad: Tensor, decay: float = 1.0) -> int | None: ...


class _ListLoops(Protocol):
    """Compiled loops over lists of indices and of magnitudes; functions of this module say what they return."""

    def largest(self, x: Tensor, k: int) -> Tensor: ...

    def largest_first(self, x: Tensor, count: int) -> Tensor: ...

    def ranked(self, x: Tensor, ranks: Sequence[int]) -> Tensor: ...

    def first_distinct(self, indices: Tensor, numel: int, k: int) -> Tensor: ...


class _TritonLoops(_Loops, Protocol):
    """What Triton's kernels offer beyond that."""

    def takes(self, *tensors: Tensor) -> bool: ...

    def check(self, device: torch.device) -> None: ...

    def largest(self, x: Tensor, k: int, sample: int) -> Tensor: ...

    def absorb_flagged_(self, residual: Tensor, grad: Tensor) -> Tensor: ...


def compiled(x: Tensor) -> bool:
    """Tell whether the compiled loops serve this tensor (float32, contiguous, on a CPU, numba installed)."""
    fits = x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous()
    return fits and _with_numba() is not None


@cache
def _with_numba() -> _CpuLoops | None:
    """Return the compiled loops, or None without numba: the reference does the same work more slowly."""
    try:
        from micro.kernels import cpu
    except ImportError:
        return None
    return cpu


def on_gpu(*tensors: Tensor) -> bool:
    """Tell whether Triton's kernels serve these tensors (contiguous, on an NVIDIA GPU of capability 8.0 or more)."""
    if not all(_is_gpu(x.device) for x in tensors):
        return False
    loops = _with_triton()
    return loops is not None and loops.takes(*tensors) and all(_runs(x.device) for x in tensors)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None


@cache
def _with_triton() -> "_TritonLoops | None":
    """Return Triton's kernels, or None without triton, which torch's wheels for CUDA bring."""
    try:
        from micro.kernels import triton
    except ImportError:
        return None
    return triton


@cache
def _runs(device: torch.device) -> bool:
    """Tell whether a kernel runs on this device; it needs a C compiler, for one."""
    try:
        cast(_TritonLoops, _with_triton()).check(device)
    except Exception as error:  # whatever Triton, the driver or the C compiler raise
        warnings.warn(
            f"torch does the work of micro's kernels on {device}, where they do not run: {error}", stacklevel=2
        )
        return False
    return True


def codes_for(*values: Tensor, has_gpu_form: bool = True) -> ModuleType | None:
    """Return the module of the codes that serves these tensors, else None.

    It is `micro.kernels.codes`, compiled for a CPU, or `micro.kernels.triton.codes`, which has the same names.
    """
    if all(map(compiled, values)):
        return _codes()
    fits = has_gpu_form and all(x.dtype == torch.float32 for x in values)
    return _codes_on_gpu() if fits and on_gpu(*values) else None


def part_codes_for(*vectors: Tensor) -> ModuleType | None:
    """Return the module of the compiled codes that encode parts of these vectors in one call, else None."""
    return _part_codes() if all(map(compiled, vectors)) else None


def codes_on(device: torch.device) -> ModuleType | None:
    """Return the module of the compiled codes where whole numbers on ``device`` are packed by it, else None."""
    return _codes() if device.type == "cpu" and _with_numba() is not None else None


@cache
def _choosing() -> _ListLoops | None:
    """Return the compiled loops over lists, or None without numba."""
    if _with_numba() is None:
        return None
    from micro.kernels import choosing

    return choosing


def momentum_for(*vectors: Tensor) -> ModuleType | None:
    """Return the module of the compiled momentum correction, where it serves these vectors, else None."""
    return _momentum() if all(map(compiled, vectors)) else None


@cache
def _momentum() -> ModuleType:
    from micro.kernels import momentum

    return momentum


@cache
def _codes() -> ModuleType:
    from micro.kernels import codes

    return codes


@cache
def _part_codes() -> ModuleType:
    from micro.kernels import part_codes

    return part_codes


@cache
def _codes_on_gpu() -> ModuleType:
    from micro.kernels.triton import codes

    return codes


def cuts_for(vector: Tensor) -> ModuleType:
    """Return the module that cuts a selection of this vector by counts: `cuts`, or `cuts_reference` in plain torch."""
    return _cuts(is_compiled=compiled(vector))


@cache
def _cuts(*, is_compiled: bool) -> ModuleType:
    if is_compiled:
        from micro.kernels import cuts

        return cuts
    from micro.kernels import cuts_reference

    return cuts_reference


def _for(*tensors: Tensor) -> _Loops:
    """Return the module whose loops serve these tensors."""
    if on_gpu(*tensors):
        return cast(_TritonLoops, _with_triton())
    return _with_numba() or reference if all(map(compiled, tensors)) else reference


def above(x: Tensor, threshold: float) -> Tensor:
    """Return the ascending (k,) int32 indices of ``x`` (numel,) with abs(x) >= threshold; NaN is never among them.

    The threshold is rounded to the dtype of ``x`` first, as torch does when it compares a tensor with a number.
    """
    return above_with_magnitudes(x, threshold)[0]


def above_with_magnitudes(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return what `above` returns, and the magnitudes (k,) of those elements, in one scan."""
    return _for(x).above(x, threshold)


def above_by_piece(x: Tensor, pieces: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `above_with_magnitudes` does, with a threshold for each of S pieces, in one scan of these alone.

    Args:
        pieces: (S, 2) int64 starts and stops, ascending, not overlapping.
        thresholds: (S,) rounded to the dtype of ``x`` first.
    """
    return _for(x).above_by_piece(x, pieces, thresholds)


def kth_by_run(magnitudes: Tensor, lengths: Tensor, ranks: Tensor) -> Tensor:
    """Return the ``ranks[s]``-th largest (S,) of ``magnitudes`` (m,) in each of S neighbouring runs.

    Args:
        lengths: (S,) int64, m in sum.
        ranks: (S,) int64 from 1; infinity is returned for ranks below, 0 for ranks beyond a run's length.
    """
    return _for(magnitudes).kth_by_run(magnitudes, lengths, ranks)


def absorb_(residual: Tensor, grad: Tensor, *, decay: float = 1.0) -> int | None:
    """Add ``grad`` (numel,) to ``decay`` times ``residual`` (numel,) and set it to zero, in one pass over both.

    The residual stays finite, and so do sums of as many residuals as there may be ranks. A NaN or Inf of the gradient
    is left out; zero is kept where a sum reaches the largest number times 2^-28, which is 2^100 in single precision.

    Returns:
        the index of the first sum that is not finite or that large, None where there is none.

    Raises:
        ValueError: the vectors differ in length; the compiled loops themselves do not look.
    """
    if residual.numel() != grad.numel():
        raise ValueError(f"gradient must have the residual's {residual.numel()} elements, got {grad.numel()}")
    loops = _with_numba()
    if loops is not None and compiled(residual) and (compiled(grad) or _is_narrow(grad)):
        return loops.absorb_(residual, grad, decay)
    _decay_(residual, decay)
    return _for(grad, residual).absorb_(residual, grad)


def absorb_unread_(residual: Tensor, grad: Tensor, *, decay: float = 1.0) -> int | Tensor | None:
    """Do what `absorb_` does; on an accelerator the index stays there: (1,) int32, numel where there is none."""
    serves_gpu = on_gpu(grad, residual)
    if residual.device.type == "cpu" and not serves_gpu:
        return absorb_(residual, grad, decay=decay)
    _decay_(residual, decay)
    if serves_gpu:
        return cast(_TritonLoops, _with_triton()).absorb_flagged_(residual, grad)
    return reference.absorb_flagged_(residual, grad)


def _decay_(residual: Tensor, decay: float) -> None:
    if decay != 1:
        residual.mul_(decay)


def _is_narrow(x: Tensor) -> bool:
    """Tell whether ``x`` is a contiguous vector of 16-bit numbers on a CPU."""
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) and x.is_contiguous()


def magnitude_counts(x: Tensor, *, first_bit_pattern: int, shift: int, num_bins: int) -> Tensor:
    """Return (num_bins,) int32 counts of the magnitudes of ``x`` (numel,) by ranges of their float32 bit patterns.

    Bin b counts patterns from ``first_bit_pattern + (b << shift)`` on, ``1 << shift`` of them; what lies outside of all
    bins, zeros, NaN and infinity are not counted.
    """
    return _for(x).magnitude_counts(x, first_bit_pattern, shift, num_bins)


def largest(x: Tensor, k: int) -> Tensor:
    """Return the ascending (min(k, numel),) int32 indices of the k largest magnitudes; ties go to the lowest index.

    Exact. A sample estimates the k-th magnitude, one scan collects what is above the estimate, and top-k runs on those
    few. Where too few are above, the scan is repeated with a lower estimate.
    """
    numel, loops = x.numel(), _choosing()
    if k == 0 or k >= numel:
        return reference.largest(x, k)
    is_long = numel > 2 * SAMPLE and 4 * k <= numel
    if is_long and on_gpu(x):
        return cast(_TritonLoops, _with_triton()).largest(x, k, SAMPLE)
    if loops is None or not compiled(x):
        return reference.largest(x, k)
    if not is_long:
        return loops.largest(x, k)
    sample = x[:: numel // SAMPLE].abs()
    expected = sample.numel() * k / numel
    rank = math.ceil(expected + 3 * math.sqrt(expected) + 1)
    while rank < sample.numel():
        guess = float(torch.topk(sample, rank, sorted=False).values.min())
        candidates, magnitudes = above_with_magnitudes(x, guess)
        if candidates.numel() >= k:
            return candidates.index_select(0, loops.largest(magnitudes, k))
        rank *= 2
    return loops.largest(x, k)


def largest_first(x: Tensor, count: int) -> Tensor:
    """Return the places (min(count, m),) int64 of the largest magnitudes of ``x`` (m,), the largest first; no NaN.

    Among equals the lowest place is first.
    """
    loops = _choosing()
    if loops is not None and compiled(x):
        return loops.largest_first(x, count)
    return torch.argsort(x.abs(), descending=True, stable=True)[:count]


def ranked(x: Tensor, ranks: Sequence[int]) -> Tensor:
    """Return the magnitudes (R,) that come at these ``ranks``, from 1 to numel, among those of ``x`` (numel,)."""
    loops = _choosing()
    if loops is not None and compiled(x):
        return loops.ranked(x, ranks)
    falling = torch.topk(x.abs(), max(ranks)).values
    return torch.stack([falling[rank - 1] for rank in ranks])


def largest_of_each(x: Tensor, spans: Tensor, counts: Tensor, *, longest: int) -> Tensor | None:
    """Return the ascending int32 indices of the ``counts`` (S,) largest magnitudes of each of S short pieces.

    Exact; ties go to the lowest index. None where no compiled loop serves them, or the ``longest`` piece would be read
    from memory more than once.

    Args:
        spans: (S, 2) int64 starts and stops, ascending, not overlapping.
        counts: (S,) int64, none more than the piece has.
    """
    if longest > LONGEST_NEAR or not compiled(x):
        return None
    from micro.kernels import near_pieces

    return near_pieces.largest_of_each(x, spans, counts)


def distinct(indices: Tensor, numel: int) -> Tensor:
    """Return the ascending indices that ``indices`` (m,), int32 or int64 in [0, numel), hold, each of them once."""
    loops = _marking(indices, numel)
    if loops is None:
        ascending: Tensor = torch.unique(indices)
        return ascending
    return loops.first_distinct(indices, numel, indices.numel())


def first_distinct(indices: Tensor, numel: int, k: int) -> Tensor:
    """Return, in ascending order, the first k that differ of ``indices`` (m,), int32 or int64 in [0, numel).

    Fewer where ``indices`` does not hold as many.
    """
    loops = _marking(indices, numel)
    return loops.first_distinct(indices, numel, k) if loops else reference.first_distinct(indices, k)


def _marking(indices: Tensor, numel: int) -> _ListLoops | None:
    """Return the loops that mark indices in a map of all places, where there are enough of them for it."""
    is_dense = indices.numel() * SPARSEST > numel and indices.is_contiguous()
    return _choosing() if is_dense and indices.device.type == "cpu" else None


def added(indices: Tensor, values: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    """Return the union (m,) int32 of lists of indices and the sums (m,) of their values, added in the order given.

    None where no compiled loop serves them: values that are not float32 on a CPU, indices that do not ascend, more
    lists than a walk along all pays for.

    Args:
        indices, values: (sum(counts),) the entries of one list after the other.
    """
    if len(counts) > MOST_MERGED or not _are_entries(values, indices):
        return None
    from micro.kernels import merging

    return merging.added(indices, values, counts)


def common(indices: Tensor, values: Tensor, among: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the entries (indices and values) whose indices are in ``among`` too; None where `added` would be."""
    if not _are_entries(values, indices, among):
        return None
    from micro.kernels import merging

    return merging.common(indices, values, among)


def _are_entries(values: Tensor, *indices: Tensor) -> bool:
    """Tell whether compiled loops serve these values and lists of indices."""
    return compiled(values) and all(part.dtype is torch.int32 and part.is_contiguous() for part in indices)


def prepare() -> None:
    """Compile the loops now, or load what was compiled before, so that no step has to wait for it."""
    from micro.kernels import places
    from micro.kernels.sums import absorb_and_sum_, sums_above

    x = torch.ones(1)
    absorb_(x, torch.ones(1))
    absorb_and_sum_(x, torch.ones(1))
    sums_above(x, 0.5)
    ranked(x, [1])
    place = torch.zeros(1, dtype=torch.int32)
    places.add_(x, place, places.gather(x, place))
    above(x, 0.5)
    magnitude_counts(x, first_bit_pattern=0, shift=20, num_bins=1)
    largest(torch.ones(2), 1)
    distinct(torch.zeros(1, dtype=torch.int32), 1)
