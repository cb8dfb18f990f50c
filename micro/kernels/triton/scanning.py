"""Find all elements at or above a threshold, and exact top-k based on that."""

import torch
import triton.language as tl
from torch import Tensor

from micro.kernels import reference
from micro.kernels.sampling import sampled_largest
from micro.kernels.triton.launching import BLOCK, kernel, launch, num_programs, places


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


def above(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return indices (k,) int32 and magnitudes (k,) of contiguous ``x`` (numel,) with abs(x) >= threshold."""
    count, lists = counted_above(x, threshold)
    return lists(int(count))  # host sync: how much memory the lists need


def counted_above(x: Tensor, threshold: float | Tensor) -> tuple[Tensor, reference.Lists]:
    """Return how many `above` finds (), and what makes its lists once the host has read that."""
    if isinstance(threshold, Tensor):
        cut = threshold.to(x.dtype)
    else:  # rounded on the host
        cut = torch.full((), float(torch.tensor(threshold, dtype=x.dtype)), dtype=x.dtype, device=x.device)
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


def largest(x: Tensor, k: int) -> Tensor:
    """Return the ascending (k,) int32 indices of the k largest magnitudes of contiguous ``x``; see micro.kernels."""
    return sampled_largest(x, k, above, reference.largest)
