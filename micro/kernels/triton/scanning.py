"""Find what is at or above a threshold, count by magnitude, and exact top-k on top of them."""

import torch
import triton.language as tl
from torch import Tensor

from micro.kernels import reference
from micro.kernels.reference import is_sampled, sampled_rank
from micro.kernels.triton.launching import ALIGNED, BLOCK, each_block, kernel, launch, num_programs

SCAN_PROGRAMS = (
    1024  # of the histogram: each adds its counts once, so there are not many more than a GPU runs at a time
)


@kernel
def _chosen(x: tl.tensor, threshold: tl.tensor, offsets: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Return the magnitudes at ``offsets``, and which of them are at or above the threshold."""
    loaded = tl.load(x + offsets, mask=mask, other=0)
    magnitudes = tl.abs(loaded if loaded.dtype == tl.float64 else loaded.to(tl.float32))
    return magnitudes, mask & (magnitudes >= threshold.to(magnitudes.dtype))


@kernel
def _count(arguments: tl.tuple, CONSTANTS: tl.tuple, block: tl.tensor, offsets: tl.tensor, mask: tl.tensor) -> None:
    x, threshold, counts = arguments
    _, chosen = _chosen(x, tl.load(threshold), offsets, mask)
    tl.store(counts + block, tl.sum(chosen.to(tl.int32)))


@kernel
def count_kernel(
    x: tl.tensor,
    threshold: tl.tensor,
    counts: tl.tensor,
    numel: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Count what passes ``threshold`` (1,) in each block: ``counts`` (programs,) int32."""
    each_block(numel, _count, (x, threshold, counts), (), ALIGNED, BLOCK)


@kernel
def _put(arguments: tl.tuple, CONSTANTS: tl.tuple, block: tl.tensor, offsets: tl.tensor, mask: tl.tensor) -> None:
    x, threshold, first, indices, magnitudes, room = arguments
    found, chosen = _chosen(x, tl.load(threshold), offsets, mask)
    ones = chosen.to(tl.int32)
    places = first + tl.cumsum(ones) - ones
    kept = chosen & (places < room)
    tl.store(indices + places, offsets, mask=kept)
    tl.store(magnitudes + places, found, mask=kept)


@kernel
def put_kernel(
    x: tl.tensor,
    threshold: tl.tensor,
    ends: tl.tensor,
    indices: tl.tensor,
    magnitudes: tl.tensor,
    numel: tl.tensor,
    room: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write indices and magnitudes of the first ``room`` that pass; ``ends`` (programs,) are the sums of the counts."""
    block = tl.program_id(0)
    first = tl.load(ends + block - 1, mask=block > 0, other=0)
    if (tl.load(ends + block) > first) & (first < room):  # most blocks hold something only at a high density
        each_block(numel, _put, (x, threshold, first, indices, magnitudes, room), (), ALIGNED, BLOCK)


@kernel
def _bin_counts(
    x: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    first: tl.tensor,
    shift: tl.tensor,
    num_bins: tl.tensor,
    NUM_BINS: tl.constexpr,
) -> tl.tensor:
    """Return the counts of the magnitudes at ``offsets`` by bins."""
    patterns = tl.abs(tl.load(x + offsets, mask=mask, other=0).to(tl.float32)).to(tl.int32, bitcast=True)
    counted = (patterns > 0) & (patterns >= first) & (patterns < 0x7F800000)
    bins = tl.where(counted, patterns - first, 0) >> shift
    return tl.histogram(bins, NUM_BINS, mask=counted & (bins < num_bins))


@kernel
def histogram_kernel(
    x: tl.tensor,
    bins: tl.tensor,
    first: tl.tensor,
    shift: tl.tensor,
    num_bins: tl.tensor,
    numel: tl.tensor,
    NUM_BINS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add to ``bins`` (num_bins,) int32 how many magnitudes lie where."""
    whole = numel // ALIGNED * ALIGNED
    lanes = tl.arange(0, BLOCK)
    counts = tl.zeros((NUM_BINS,), dtype=tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(whole, BLOCK), tl.num_programs(0)):
        offsets = block * BLOCK + lanes
        counts += _bin_counts(x, offsets, offsets < whole, first, shift, num_bins, NUM_BINS)
    if tl.program_id(0) == 0:
        offsets = whole + lanes
        counts += _bin_counts(x, offsets, offsets < numel, first, shift, num_bins, NUM_BINS)
    places = tl.arange(0, NUM_BINS)
    tl.atomic_add(bins + places, counts, mask=(places < num_bins) & (counts > 0))


def above(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return indices (k,) int32 and magnitudes (k,) of contiguous ``x`` (numel,) with abs(x) >= threshold."""
    rounded = float(torch.tensor(threshold, dtype=x.dtype))  # on the host
    return _above_cut(x, torch.full((1,), rounded, dtype=x.dtype, device=x.device))


def _above_cut(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `above` returns, for a ``threshold`` (1,) of the dtype and on the device of ``x``."""
    ends = _ends(x, threshold)
    found = int(ends[-1])  # host sync: how much memory the lists need
    return _put_first(x, threshold, ends, found)


def _ends(x: Tensor, threshold: Tensor) -> Tensor:
    """Return (programs,) int32 how many elements pass in the blocks up to each."""
    programs = num_programs(x.numel(), BLOCK)
    counts = torch.empty(programs, dtype=torch.int32, device=x.device)
    launch(count_kernel, programs, x, x, threshold, counts, x.numel(), ALIGNED=ALIGNED, BLOCK=BLOCK)
    return counts.cumsum(0, dtype=torch.int32)


def _put_first(x: Tensor, threshold: Tensor, ends: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Return indices (room,) int32 and magnitudes (room,) of the first that pass, then zeros."""
    indices = torch.zeros(room, dtype=torch.int32, device=x.device)
    magnitudes = torch.zeros(room, dtype=x.dtype, device=x.device)
    if room:
        outputs = (ends, indices, magnitudes, x.numel(), room)
        launch(put_kernel, ends.numel(), x, x, threshold, *outputs, ALIGNED=ALIGNED, BLOCK=BLOCK)
    return indices, magnitudes


def magnitude_counts(x: Tensor, first_bit_pattern: int, shift: int, num_bins: int) -> Tensor:
    """Return (num_bins,) int32 counts of contiguous ``x`` (numel,) by ranges of float32 bit patterns."""
    bins = torch.zeros(num_bins, dtype=torch.int32, device=x.device)
    programs = min(num_programs(x.numel(), BLOCK), SCAN_PROGRAMS)
    constants = {"NUM_BINS": max(32, 1 << (num_bins - 1).bit_length()), "ALIGNED": ALIGNED, "BLOCK": BLOCK}
    launch(histogram_kernel, programs, x, x, bins, first_bit_pattern, shift, num_bins, x.numel(), **constants)
    return bins


def largest(x: Tensor, k: int) -> Tensor:
    """Return the ascending (k,) int32 indices of the k largest magnitudes; ties go to the lowest index. Exact.

    A sample of a long vector tells a magnitude that a little more than k elements probably reach; top-k runs on those.
    """
    numel = x.numel()
    if not is_sampled(numel, k):
        return reference.largest(x, k)
    sample = x[:: numel // reference.SAMPLE].abs()
    rank = min(sampled_rank(sample.numel(), numel, k), sample.numel())
    candidates, magnitudes = _above_cut(x, torch.topk(sample, rank, sorted=False).values.amin(0, keepdim=True))
    if candidates.numel() < k:
        return reference.largest(x, k)
    return candidates.index_select(0, reference.largest(magnitudes, k))
