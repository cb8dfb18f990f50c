"""Add the gradient to the residual, clear it, and collect candidates of the rank's slice, in one pass over both."""

import torch
import triton.language as tl
from torch import Tensor

from micro.kernels.candidates import NUM_BINS, Candidates
from micro.kernels.reference import limit
from micro.kernels.triton.launching import ALIGNED, BLOCK, each_block, kernel, launch, num_programs


@kernel
def absorbed(
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
def _absorb(arguments: tl.tuple, CONSTANTS: tl.tuple, block: tl.tensor, offsets: tl.tensor, mask: tl.tensor) -> None:
    residual, grad, first_bad = arguments
    absorbed(residual, grad, first_bad, offsets, mask, CONSTANTS[0])


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
    each_block(numel, _absorb, (residual, grad, first_bad), (LIMIT,), ALIGNED, BLOCK)


@kernel
def _passing(acc: tl.tensor, inside: tl.tensor, lowest: tl.tensor) -> tl.tensor:
    """Return which sums inside of the slice are at or above the magnitude of bit pattern ``lowest``."""
    return inside & (tl.abs(acc) >= lowest.to(tl.float32, bitcast=True))


@kernel
def _count(
    acc: tl.tensor,
    inside: tl.tensor,
    lowest: tl.tensor,
    shift: tl.tensor,
    counts: tl.tensor,
    bins: tl.tensor,
    NUM_BINS: tl.constexpr,
) -> None:
    """Write how many pass to ``counts`` (1,), and add them to the counts by magnitude."""
    chosen = _passing(acc, inside, lowest)
    count = tl.sum(chosen.to(tl.int32))
    tl.store(counts, count)
    if count > 0:
        patterns = tl.abs(acc).to(tl.float32).to(tl.int32, bitcast=True)
        numbers = tl.minimum(tl.maximum((patterns - lowest) >> shift, 0), NUM_BINS - 1)
        found = tl.histogram(numbers, NUM_BINS, mask=chosen)
        tl.atomic_add(bins + tl.arange(0, NUM_BINS), found, mask=found > 0)


@kernel
def _absorb_and_count(
    arguments: tl.tuple, CONSTANTS: tl.tuple, block: tl.tensor, offsets: tl.tensor, mask: tl.tensor
) -> None:
    residual, grad, plan, counts, first_bad, bins = arguments
    start, stop = tl.load(plan), tl.load(plan + 1)
    lowest, shift = tl.load(plan + 2), tl.load(plan + 3)
    acc = absorbed(residual, grad, first_bad, offsets, mask, CONSTANTS[0])
    inside = (offsets >= start) & (offsets < stop) & mask
    _count(acc, inside, lowest, shift, counts + block, bins, CONSTANTS[1])


@kernel
def absorb_and_count_kernel(
    residual: tl.tensor,
    grad: tl.tensor,
    plan: tl.tensor,
    counts: tl.tensor,
    first_bad: tl.tensor,
    bins: tl.tensor,
    numel: tl.tensor,
    LIMIT: tl.constexpr,
    NUM_BINS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Do what ``absorb_kernel`` does, and count what ``plan`` (4,) describes of the sums: by block and by magnitude."""
    arguments = (residual, grad, plan, counts, first_bad, bins)
    each_block(numel, _absorb_and_count, arguments, (LIMIT, NUM_BINS), ALIGNED, BLOCK)


@kernel
def _place(arguments: tl.tuple, CONSTANTS: tl.tuple, block: tl.tensor, offsets: tl.tensor, mask: tl.tensor) -> None:
    residual, plan, first, indices, values, capacity = arguments
    start, stop, lowest = tl.load(plan), tl.load(plan + 1), tl.load(plan + 2)
    acc = tl.load(residual + offsets, mask=mask, other=0)  # not by the slice, which may begin anywhere
    chosen = _passing(acc, mask & (offsets >= start) & (offsets < stop), lowest)
    ones = chosen.to(tl.int32)
    places = first + tl.cumsum(ones) - ones
    kept = chosen & (places < capacity)
    tl.store(indices + places, offsets, mask=kept)
    tl.store(values + places, acc, mask=kept)


@kernel
def place_kernel(
    residual: tl.tensor,
    plan: tl.tensor,
    ends: tl.tensor,
    indices: tl.tensor,
    values: tl.tensor,
    numel: tl.tensor,
    capacity: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write indices and sums of what ``plan`` describes, in order; ``ends`` (programs,) are the sums of the counts."""
    block = tl.program_id(0)
    first = tl.load(ends + block - 1, mask=block > 0, other=0)
    if (tl.load(ends + block) > first) & (first < capacity):  # programs outside of the slice end here
        each_block(numel, _place, (residual, plan, first, indices, values, capacity), (), ALIGNED, BLOCK)


def absorb_flagged_(residual: Tensor, grad: Tensor) -> Tensor:
    """Add ``grad`` (numel,) to ``residual`` and set it to zero; see micro.kernels. The host reads nothing."""
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
    return first_bad


def absorb_(residual: Tensor, grad: Tensor) -> int | None:
    """Do the same, and return the index of the first sum that is too large, or None; see micro.kernels."""
    index = int(absorb_flagged_(residual, grad))  # host sync: a step in which something was not finite goes another way
    return index if index < grad.numel() else None


def absorb_and_collect_(residual: Tensor, grad: Tensor, plan: Tensor, candidates: Candidates) -> None:
    """Do what `micro.kernels.absorb_and_collect_` does."""
    numel, programs = grad.numel(), num_programs(grad.numel(), BLOCK)
    candidates.clear_(numel)
    counts = torch.empty(programs, dtype=torch.int32, device=grad.device)
    launch(
        absorb_and_count_kernel,
        programs,
        grad,
        *(residual, grad, plan, counts, candidates.first_bad, candidates.bins, numel),
        LIMIT=limit(residual.dtype),
        NUM_BINS=NUM_BINS,
        ALIGNED=ALIGNED,
        BLOCK=BLOCK,
    )
    ends = counts.cumsum(0, dtype=torch.int32)
    candidates.found.copy_(ends[-1:])
    outputs = (candidates.indices, candidates.values, numel, candidates.indices.numel())
    launch(place_kernel, programs, residual, residual, plan, ends, *outputs, ALIGNED=ALIGNED, BLOCK=BLOCK)
