"""Sums over a vector for fits of thresholds, in one read or in the pass that adds the gradient.

Numbers of a block are summed in the vector's precision, at least single, and blocks in double precision.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from micro.kernels.reference import limit
from micro.kernels.triton.absorbing import absorbed
from micro.kernels.triton.launching import BLOCK, kernel, launch, num_programs, places

ROWS = 6  # count, total, squares, magnitudes, largest, smallest


@kernel
def _write_sums(
    values: tl.tensor,
    mask: tl.tensor,
    floor: tl.tensor,
    partials: tl.tensor,
) -> None:
    """Write the six sums of those values whose magnitude is larger than the floor, each a row after the one before."""
    magnitudes = tl.abs(values)
    counted = mask & (magnitudes > floor)
    kept = tl.where(counted, magnitudes, 0)
    largest = tl.max(kept)
    shares = kept / tl.where(largest > 0, largest, 1)  # of 1 at most: their squares are in range
    scale = largest.to(tl.float64)
    partials += tl.program_id(0)
    rows = tl.num_programs(0)
    tl.store(partials, tl.sum(counted.to(tl.int32)))
    tl.store(partials + rows, tl.sum(tl.where(counted, values, 0)))
    tl.store(partials + 2 * rows, tl.sum(shares * shares).to(tl.float64) * scale * scale)
    tl.store(partials + 3 * rows, tl.sum(kept))
    tl.store(partials + 4 * rows, largest)
    tl.store(partials + 5 * rows, tl.min(tl.where(counted, magnitudes, float("inf"))))


@kernel
def sum_kernel(x: tl.tensor, floor: tl.tensor, partials: tl.tensor, numel: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Write the sums of each block of ``x`` (numel,) above ``floor`` (1,) to ``partials`` (6, programs) float64."""
    offsets, mask = places(numel, BLOCK)
    loaded = tl.load(x + offsets, mask=mask, other=0)
    values = loaded if loaded.dtype == tl.float64 else loaded.to(tl.float32)
    _write_sums(values, mask, tl.load(floor).to(values.dtype), partials)


@kernel
def absorb_and_sum_kernel(
    residual: tl.tensor,
    grad: tl.tensor,
    first_bad: tl.tensor,
    partials: tl.tensor,
    numel: tl.tensor,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Do what ``absorb_kernel`` does, and write the sums of each block to ``partials`` (6, programs) float64."""
    offsets, mask = places(numel, BLOCK)
    acc = absorbed(residual, grad, first_bad, offsets, mask, LIMIT)
    _write_sums(acc, mask, tl.full((), -1.0, acc.dtype), partials)


def sums(x: Tensor, floor: float) -> list[float]:
    """Return the sums of those of contiguous ``x`` (numel,) whose magnitude is larger than ``floor``."""
    programs, partials = _partials(x)
    rounded = torch.full((1,), floor, dtype=x.dtype, device=x.device)
    launch(sum_kernel, programs, x, x, rounded, partials, x.numel(), BLOCK=BLOCK)
    return _together(partials)


def absorb_and_sum_(residual: Tensor, grad: Tensor) -> tuple[Tensor, list[float]]:
    """Do what `absorb_` does; return what it does, and the residual's sums."""
    programs, partials = _partials(grad)
    first_bad = torch.full((1,), grad.numel(), dtype=torch.int32, device=grad.device)
    constants: dict[str, Any] = {"LIMIT": limit(residual.dtype), "BLOCK": BLOCK}
    launch(absorb_and_sum_kernel, programs, grad, residual, grad, first_bad, partials, grad.numel(), **constants)
    return first_bad, _together(partials)


def _partials(x: Tensor) -> tuple[int, Tensor]:
    programs = num_programs(x.numel())
    return programs, torch.empty(ROWS, programs, dtype=torch.float64, device=x.device)


def _together(partials: Tensor) -> list[float]:
    largest, smallest = partials[4].amax(0, keepdim=True), partials[5].amin(0, keepdim=True)
    numbers: list[float] = torch.cat([partials[:4].sum(1), largest, smallest]).tolist()
    return numbers  # host sync: a threshold follows from them
