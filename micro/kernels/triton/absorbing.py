"""Add the gradient to the residual and clear it, in one pass over both."""

import torch
import triton.language as tl
from torch import Tensor

from micro.kernels.reference import limit
from micro.kernels.triton.launching import BLOCK, kernel, launch, num_programs, places


@kernel
def absorbed(
    residual: tl.tensor, grad: tl.tensor, first_bad: tl.tensor, offsets: tl.tensor, mask: tl.tensor, LIMIT: tl.constexpr
) -> tl.tensor:
    """Add at ``offsets``, clear the gradient there, note the first sum that is too large, and return the sums."""
    old = tl.load(residual + offsets, mask=mask, other=0)
    new = tl.load(grad + offsets, mask=mask, other=0).to(old.dtype)
    tl.debug_barrier()  # no warp writes before all have read: one may read an element that another writes
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
    BLOCK: tl.constexpr,
) -> None:
    """Add ``grad`` to ``residual`` and clear it; ``first_bad`` (1,) becomes the lowest index of a sum too large."""
    offsets, mask = places(numel, BLOCK)
    absorbed(residual, grad, first_bad, offsets, mask, LIMIT)


def absorb_(residual: Tensor, grad: Tensor) -> Tensor:
    """Add ``grad`` (numel,) to ``residual`` and set it to zero; see micro.kernels. The host reads nothing."""
    numel = grad.numel()
    first_bad = torch.full((1,), numel, dtype=torch.int32, device=grad.device)
    arguments = residual, grad, first_bad, numel
    launch(absorb_kernel, num_programs(numel), grad, *arguments, LIMIT=limit(residual.dtype), BLOCK=BLOCK)
    return first_bad
