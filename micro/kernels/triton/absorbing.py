"""Add the gradient to the residual, clear it, and collect candidates of the rank's slice, in one pass over both."""

import torch
import triton.language as tl
from torch import Tensor

from micro.kernels.candidates import NUM_BINS, Candidates
from micro.kernels.reference import limit
from micro.kernels.triton.launching import ALIGNED, BLOCK, kernel, launch, num_programs


@kernel
def _absorbed(
    residual: tl.tensor, grad: tl.tensor, first_bad: tl.tensor, offsets: tl.tensor, mask: tl.tensor, LIMIT: tl.constexpr
) -> tl.tensor:
    """Add at ``offsets``, clear the gradient there, note the first sum that is too large, and return the sums."""
    old = tl.load(residual + offsets, mask=mask, other=0)
    new = tl.load(grad + offsets, mask=mask, other=0).to(old.dtype)
    total = old + new
    is_bad = (tl.abs(total) < LIMIT) == 0  # true of NaN
    total = tl.where(is_bad, tl.where(tl.abs(new) < float("inf"), 0, old), total)
    tl.store(residual + offsets, total, mask=mask)
    tl.store(grad + offsets, tl.zeros_like(new).to(grad.dtype.element_ty), mask=mask)
    first = tl.min(tl.where(is_bad, offsets, 0x7FFFFFFF))
    if first < 0x7FFFFFFF:
        tl.atomic_min(first_bad, first)
    return total


@kernel
def absorb_kernel(
    residual: tl.tensor,
    grad: tl.tensor,
    first_bad: tl.tensor,
    numel: tl.tensor,
    LIMIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add ``grad`` to ``residual`` and clear it; ``first_bad`` (1,) becomes the lowest index of a sum too large."""
    block = tl.program_id(0)
    whole = numel // ALIGNED * ALIGNED
    lanes = tl.arange(0, BLOCK)
    if block < tl.num_programs(0) - 1:
        offsets = block * BLOCK + lanes
        _absorbed(residual, grad, first_bad, offsets, offsets < whole, LIMIT)
    else:
        offsets = whole + lanes
        _absorbed(residual, grad, first_bad, offsets, offsets < numel, LIMIT)


@kernel
def _collect(
    acc: tl.tensor,
    offsets: tl.tensor,
    inside: tl.tensor,
    lowest: tl.tensor,
    shift: tl.tensor,
    indices: tl.tensor,
    values: tl.tensor,
    found: tl.tensor,
    bins: tl.tensor,
    capacity: tl.tensor,
    NUM_BINS: tl.constexpr,
) -> None:
    """Append what is at or above the magnitude of bit pattern ``lowest``; count all of it, also beyond the capacity."""
    magnitudes = tl.abs(acc)
    chosen = inside & (magnitudes >= lowest.to(tl.float32, bitcast=True))
    ones = chosen.to(tl.int32)
    count = tl.sum(ones)
    if count > 0:
        places = tl.atomic_add(found, count) + tl.cumsum(ones) - ones
        kept = chosen & (places < capacity)
        tl.store(indices + places, offsets, mask=kept)
        tl.store(values + places, acc, mask=kept)
        patterns = magnitudes.to(tl.float32).to(tl.int32, bitcast=True)
        numbers = tl.minimum(tl.maximum((patterns - lowest) >> shift, 0), NUM_BINS - 1)
        counts = tl.histogram(numbers, NUM_BINS, mask=chosen)
        tl.atomic_add(bins + tl.arange(0, NUM_BINS), counts, mask=counts > 0)


@kernel
def absorb_and_collect_kernel(
    residual: tl.tensor,
    grad: tl.tensor,
    plan: tl.tensor,
    indices: tl.tensor,
    values: tl.tensor,
    found: tl.tensor,
    first_bad: tl.tensor,
    bins: tl.tensor,
    numel: tl.tensor,
    capacity: tl.tensor,
    LIMIT: tl.constexpr,
    NUM_BINS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Do what ``absorb_kernel`` does, and collect the candidates that ``plan`` (4,) describes from the sums."""
    start, stop = tl.load(plan), tl.load(plan + 1)
    lowest, shift = tl.load(plan + 2), tl.load(plan + 3)
    block = tl.program_id(0)
    whole = numel // ALIGNED * ALIGNED
    lanes = tl.arange(0, BLOCK)
    if block < tl.num_programs(0) - 1:
        offsets = block * BLOCK + lanes
        acc = _absorbed(residual, grad, first_bad, offsets, offsets < whole, LIMIT)
        if (block * BLOCK < stop) & ((block + 1) * BLOCK > start):
            inside = (offsets >= start) & (offsets < stop) & (offsets < whole)
            _collect(acc, offsets, inside, lowest, shift, indices, values, found, bins, capacity, NUM_BINS)
    else:
        offsets = whole + lanes
        acc = _absorbed(residual, grad, first_bad, offsets, offsets < numel, LIMIT)
        inside = (offsets >= start) & (offsets < stop) & (offsets < numel)
        _collect(acc, offsets, inside, lowest, shift, indices, values, found, bins, capacity, NUM_BINS)


def absorb_(residual: Tensor, grad: Tensor) -> int | None:
    """Add ``grad`` (numel,) to ``residual`` and set it to zero; see micro.kernels."""
    numel = grad.numel()
    first_bad = torch.full((1,), numel, dtype=torch.int32, device=grad.device)
    launch(
        absorb_kernel,
        num_programs(numel, BLOCK),
        grad,
        *(residual, grad, first_bad, numel),
        LIMIT=limit(residual.dtype),
        ALIGNED=ALIGNED,
        BLOCK=BLOCK,
    )
    index = int(first_bad)  # host sync: a step in which something was not finite goes another way
    return index if index < numel else None


def absorb_and_collect_(residual: Tensor, grad: Tensor, plan: Tensor, candidates: Candidates) -> None:
    """Do what `micro.kernels.candidates.absorb_and_collect_` does, without a read by the host."""
    numel = grad.numel()
    candidates.clear_(numel)
    launch(
        absorb_and_collect_kernel,
        num_programs(numel, BLOCK),
        grad,
        *(residual, grad, plan, candidates.indices, candidates.values),
        *(candidates.found, candidates.first_bad, candidates.bins, numel, candidates.indices.numel()),
        LIMIT=limit(residual.dtype),
        NUM_BINS=NUM_BINS,
        ALIGNED=ALIGNED,
        BLOCK=BLOCK,
    )
    candidates.sort_()
