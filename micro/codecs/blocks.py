"""Helpers for codecs that scale blocks: neighbouring values share a scale, sent before their codes."""

from collections.abc import Callable

import torch
from torch import Tensor

from micro.codecs.base import from_bytes, to_bytes

LARGEST = 2.0**127  # scales are clamped to it, so that rounding up stays finite in single precision
SCALE_BYTES = 4


def check_block(name: str, block: int) -> None:
    """Raise ValueError unless ``block``, the number of values that share a scale, is at least 1."""
    if block < 1:
        raise ValueError(f"block of {name} must be at least 1, got {block}")


def num_blocks(count: int, block: int) -> int:
    """Return the number of blocks of ``count`` values; the last may be short."""
    return -(-count // block)


def single(values: Tensor) -> Tensor:
    """Return finite ``values`` clamped to single precision; not copied if they have it already."""
    if values.dtype is torch.float32:
        return values.contiguous()
    largest = torch.finfo(torch.float32).max
    return values.clamp(-largest, largest).to(torch.float32)


def rows(vector: Tensor, block: int) -> list[Tensor]:
    """Return views of 1-D ``vector``: the whole blocks (num_blocks, block), then the short one, each if it exists."""
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
    """Return the sum of every row (b,) of ``terms`` (b, size), which is overwritten.

    The upper half is repeatedly added to the lower, so that compiled loops and all devices return the same bits.
    """
    count = terms.shape[1]
    while count > 1:
        half = 1 << ((count - 1).bit_length() - 1)
        terms[:, : count - half] += terms[:, half:count]
        count = half
    return terms[:, 0].clone()


def over(x: Tensor, number: float) -> Tensor:
    """Return ``x / number``, correctly rounded; with a host number a GPU would multiply by its inverse."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def roots(squares: Tensor) -> Tensor:
    """Return the correctly rounded square roots of float32 ``squares``; torch.sqrt is not exact on every device."""
    return squares.double().sqrt_().float()


def multiply_(vector: Tensor, factors: Tensor, block: int) -> Tensor:
    """Multiply every block of ``vector`` by its factor, in place."""
    for view, factor in _pair_with_factors(vector, factors, block):
        view.mul_(factor)
    return vector


def divided(vector: Tensor, divisors: Tensor, block: int) -> Tensor:
    """Return ``vector`` with every block divided by its divisor; a zero divisor gives zeros."""
    result = torch.empty_like(vector)
    divisors = torch.where(divisors > 0, divisors, torch.inf)
    for source, (view, divisor) in zip(rows(vector, block), _pair_with_factors(result, divisors, block), strict=True):
        torch.div(source, divisor, out=view)
    return result


def least_squares(values: Tensor, levels: Tensor, block: int) -> Tensor:
    """Return the least-squares factor of each block from ``levels`` c to ``values`` x: <x, c> / <c, c>, or 0.

    The error of a block is then never larger than the block, whatever the levels are, so error feedback converges.
    """
    inner = of_blocks(lambda x, c: sums(x * c), block, values, levels)
    squares = of_blocks(lambda c: sums(c * c), block, levels)
    return inner / squares.clamp_min(torch.finfo(torch.float32).tiny)


def join(scales: Tensor, codes: Tensor, *, highest: int = 1) -> Tensor:
    """Return the bytes of float32 ``scales``, clamped so that ``highest`` times each is finite, then the codes."""
    return torch.cat([to_bytes(scales.clamp(-LARGEST / highest, LARGEST / highest)), codes])


def parted(wire: Tensor, num_scales: int) -> tuple[Tensor, Tensor]:
    """Split a message of ``join`` into the scales (num_scales,) float32 and the bytes of the codes."""
    length = SCALE_BYTES * num_scales
    return from_bytes(wire[:length], torch.float32), wire[length:]


def _pair_with_factors(vector: Tensor, factors: Tensor, block: int) -> list[tuple[Tensor, Tensor]]:
    views = rows(vector, block)
    return list(zip(views, factors[:, None].split([view.shape[0] for view in views]), strict=True))
