"""Blocks: runs of neighbouring values that share a scale, which travels ahead of their codes."""

from collections.abc import Callable

import torch
from torch import Tensor

from micro.codecs.base import from_bytes, to_bytes

LARGEST = 2.0**127  # scales are cut here, so that rounding on top of them stays finite in single precision
SCALE_BYTES = 4


def check_block(name: str, block: int) -> None:
    """Raise ValueError unless ``block``, the number of values that share a scale, is at least 1."""
    if block < 1:
        raise ValueError(f"block of {name} must be at least 1, got {block}")


def num_blocks(count: int, block: int) -> int:
    """Return how many blocks ``count`` values make, the last of which may be short."""
    return -(-count // block)


def single(values: Tensor) -> Tensor:
    """Return finite ``values`` in single precision, cut at its largest number; themselves where they are it already."""
    if values.dtype is torch.float32:
        return values.contiguous()
    largest = torch.finfo(torch.float32).max
    return values.clamp(-largest, largest).to(torch.float32)


def rows(vector: Tensor, block: int) -> list[Tensor]:
    """Return 1-D ``vector`` as views (num_blocks, block): all whole blocks, then the short one, where there are any."""
    count, rest = divmod(vector.numel(), block)
    whole, short = vector[: count * block].view(count, block), vector[count * block :].view(1, -1)
    return [view for view, is_there in ((whole, count or not rest), (short, rest)) if is_there]


def of_blocks(statistic: Callable[..., Tensor], block: int, *vectors: Tensor) -> Tensor:
    """Return ``statistic`` of every block (num_blocks,): it maps (b, size) of each vector to (b,)."""
    return torch.cat([statistic(*views) for views in zip(*(rows(vector, block) for vector in vectors), strict=True)])


def largest_magnitudes(values: Tensor, block: int) -> Tensor:
    """Return the largest magnitude of every block (num_blocks,)."""
    return of_blocks(lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1), block, values)


def sums(terms: Tensor) -> Tensor:
    """Return the sum of every row (b,) of ``terms`` (b, size), which are used up.

    The upper half is added to the lower until one is left, so that the compiled loops and every device get the same
    bits.
    """
    count = terms.shape[1]
    while count > 1:
        half = 1 << ((count - 1).bit_length() - 1)
        terms[:, : count - half] += terms[:, half:count]
        count = half
    return terms[:, 0].clone()


def over(x: Tensor, number: float) -> Tensor:
    """Return ``x / number``, correctly rounded: a GPU multiplies by the inverse of a number of the host."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def roots(squares: Tensor) -> Tensor:
    """Return the square roots of float32 ``squares``, correctly rounded, which torch's own are not on every device."""
    return squares.double().sqrt_().float()


def multiply_(vector: Tensor, factors: Tensor, block: int) -> Tensor:
    """Multiply every block of ``vector`` by its factor, in place."""
    for view, factor in _with(vector, factors, block):
        view.mul_(factor)
    return vector


def divided(vector: Tensor, divisors: Tensor, block: int) -> Tensor:
    """Return ``vector`` with every block divided by its divisor; a divisor of zero leaves zeros."""
    result = torch.empty_like(vector)
    divisors = torch.where(divisors > 0, divisors, torch.inf)
    for source, (view, divisor) in zip(rows(vector, block), _with(result, divisors, block), strict=True):
        torch.div(source, divisor, out=view)
    return result


def least_squares(values: Tensor, levels: Tensor, block: int) -> Tensor:
    """Return the factor of every block's ``levels`` that comes nearest to its ``values``: <x, c> / <c, c>, or 0.

    What is left of a block is then never larger than the block, whatever the levels are: with the residual kept, such
    a code is sound.
    """
    inner = of_blocks(lambda x, c: sums(x * c), block, values, levels)
    squares = of_blocks(lambda c: sums(c * c), block, levels)
    return inner / squares.clamp_min(torch.finfo(torch.float32).tiny)


def join(scales: Tensor, codes: Tensor, *, highest: int = 1) -> Tensor:
    """Return the bytes of float32 ``scales``, cut so that ``highest`` times any of them is finite, then the codes."""
    return torch.cat([to_bytes(scales.clamp(-LARGEST / highest, LARGEST / highest)), codes])


def parted(wire: Tensor, num_scales: int) -> tuple[Tensor, Tensor]:
    """Return the scales (num_scales,) float32 and the bytes of the codes of what ``join`` made."""
    length = SCALE_BYTES * num_scales
    return from_bytes(wire[:length], torch.float32), wire[length:]


def _with(vector: Tensor, factors: Tensor, block: int) -> list[tuple[Tensor, Tensor]]:
    views = rows(vector, block)
    return list(zip(views, factors[:, None].split([view.shape[0] for view in views]), strict=True))
