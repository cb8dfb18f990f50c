"""What the fitted selectors need to know of a vector, in one read of it."""

import torch
import triton.language as tl
from torch import Tensor

from micro.kernels.reference import Statistics, combined
from micro.kernels.triton.launching import ALIGNED, kernel, launch, num_programs

BLOCK = 4096  # elements of a program: seven numbers are written for each
WARPS = 8


@kernel
def _summarise(
    x: tl.tensor, partial: tl.tensor, offsets: tl.tensor, mask: tl.tensor, count: tl.tensor, rows: tl.tensor
) -> None:
    """Write the seven statistics of a block, each ``rows`` places after the one before."""
    loaded = tl.load(x + offsets, mask=mask, other=0)
    values = loaded.to(tl.float64) if loaded.dtype == tl.float64 else loaded.to(tl.float32)
    magnitudes = tl.abs(values)
    positive = mask & (magnitudes > 0)
    total = tl.sum(values)
    distances = tl.where(mask, values - total / tl.maximum(count, 1), 0)
    tl.store(partial, count)
    tl.store(partial + rows, tl.sum(positive.to(tl.int32)))
    tl.store(partial + 2 * rows, total)
    tl.store(partial + 3 * rows, tl.sum(distances * distances))
    tl.store(partial + 4 * rows, tl.sum(magnitudes))
    tl.store(partial + 5 * rows, tl.max(magnitudes))
    tl.store(partial + 6 * rows, tl.sum(tl.log(tl.where(positive, magnitudes, 1))))


@kernel
def statistics_kernel(
    x: tl.tensor,
    partials: tl.tensor,
    numel: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write statistics of each block of ``x`` (numel,) to ``partials`` (7, programs) float64."""
    block, rows = tl.program_id(0), tl.num_programs(0)
    whole = numel // ALIGNED * ALIGNED
    lanes = tl.arange(0, BLOCK)
    if block < rows - 1:
        offsets = block * BLOCK + lanes
        _summarise(x, partials + block, offsets, offsets < whole, tl.minimum(whole - block * BLOCK, BLOCK), rows)
    else:
        offsets = whole + lanes
        _summarise(x, partials + block, offsets, offsets < numel, numel - whole, rows)


def statistics(x: Tensor) -> Statistics:
    """Return the statistics of contiguous ``x`` (numel,), as `micro.kernels.reference.statistics` does."""
    programs = num_programs(x.numel(), BLOCK)
    partials = torch.empty(7, programs, dtype=torch.float64, device=x.device)
    launch(statistics_kernel, programs, x, x, partials, x.numel(), ALIGNED=ALIGNED, BLOCK=BLOCK, num_warps=WARPS)
    return combined(partials)
