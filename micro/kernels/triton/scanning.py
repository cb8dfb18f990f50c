"""Find what is at or above a threshold, count by magnitude, and exact top-k on top of them."""

import torch
import triton.language as tl
from torch import Tensor

from micro.kernels import reference
from micro.kernels.triton.launching import BLOCK, kernel, launch, num_programs, places

SCAN_PROGRAMS = 1024  # of the histogram, each of which adds its counts once: not many more than run at a time


@kernel
def _chosen(x: tl.tensor, threshold: tl.tensor, offsets: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Return the magnitudes at ``offsets``, and which of them are at or above the threshold."""
    loaded = tl.load(x + offsets, mask=mask, other=0)
    magnitudes = tl.abs(loaded if loaded.dtype == tl.float64 else loaded.to(tl.float32))
    return magnitudes, mask & (magnitudes >= threshold.to(magnitudes.dtype))


@kernel
def count_kernel(x: tl.tensor, threshold: tl.tensor, counts: tl.tensor, numel: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Count what passes ``threshold`` () in each block: ``counts`` (programs,) int32."""
    offsets, mask = places(numel, BLOCK)
    _, chosen = _chosen(x, tl.load(threshold), offsets, mask)
    tl.store(counts + tl.program_id(0), tl.sum(chosen.to(tl.int32)))


@kernel
def put_kernel(
    x: tl.tensor,
    threshold: tl.tensor,
    ends: tl.tensor,
    indices: tl.tensor,
    magnitudes: tl.tensor,
    numel: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write indices and magnitudes of what passes; ``ends`` (programs,) are the sums of the counts."""
    block = tl.program_id(0)
    first = tl.load(ends + block - 1, mask=block > 0, other=0)
    if tl.load(ends + block) > first:  # most blocks hold something only at a high density
        offsets, mask = places(numel, BLOCK)
        found, chosen = _chosen(x, tl.load(threshold), offsets, mask)
        ones = chosen.to(tl.int32)
        targets = first + tl.cumsum(ones) - ones
        tl.store(indices + targets, offsets, mask=chosen)
        tl.store(magnitudes + targets, found, mask=chosen)


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
    BLOCK: tl.constexpr,
) -> None:
    """Add to ``bins`` (num_bins,) int32 how many magnitudes lie where."""
    lanes = tl.arange(0, BLOCK)
    counts = tl.zeros((NUM_BINS,), dtype=tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
        offsets = block * BLOCK + lanes
        counts += _bin_counts(x, offsets, offsets < numel, first, shift, num_bins, NUM_BINS)
    numbers = tl.arange(0, NUM_BINS)
    tl.atomic_add(bins + numbers, counts, mask=(numbers < num_bins) & (counts > 0))


def above(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return indices (k,) int32 and magnitudes (k,) of contiguous ``x`` (numel,) with abs(x) >= threshold."""
    count, lists = counted_above(x, threshold)
    return lists(int(count))  # host sync: how much memory the lists need


def counted_above(x: Tensor, threshold: float | Tensor) -> tuple[Tensor, reference.Lists]:
    """Return how many `above` finds (), and what makes its lists once the host has read that."""
    cut = torch.as_tensor(threshold, dtype=x.dtype).to(x.device, non_blocking=True)  # a number is rounded on the host
    programs = num_programs(x.numel())
    counts = torch.empty(programs, dtype=torch.int32, device=x.device)
    launch(count_kernel, programs, x, x, cut, counts, x.numel(), BLOCK=BLOCK)
    ends = counts.cumsum(0, dtype=torch.int32)

    def lists(count: int) -> tuple[Tensor, Tensor]:
        indices = torch.empty(count, dtype=torch.int32, device=x.device)
        magnitudes = torch.empty(count, dtype=x.dtype, device=x.device)
        if count:
            launch(put_kernel, programs, x, x, cut, ends, indices, magnitudes, x.numel(), BLOCK=BLOCK)
        return indices, magnitudes

    return ends[-1], lists


def magnitude_counts(x: Tensor, first_bit_pattern: int, shift: int, num_bins: int) -> Tensor:
    """Return (num_bins,) int32 counts of contiguous ``x`` (numel,) by ranges of float32 bit patterns."""
    bins = torch.zeros(num_bins, dtype=torch.int32, device=x.device)
    programs = min(num_programs(x.numel()), SCAN_PROGRAMS)
    constants = {"NUM_BINS": max(32, 1 << (num_bins - 1).bit_length()), "BLOCK": BLOCK}
    launch(histogram_kernel, programs, x, x, bins, first_bit_pattern, shift, num_bins, x.numel(), **constants)
    return bins


def largest(x: Tensor, k: int) -> Tensor:
    """Return the ascending (k,) int32 indices of the k largest magnitudes of contiguous ``x``; see micro.kernels."""
    return reference.sampled_largest(x, k, above, reference.largest)
