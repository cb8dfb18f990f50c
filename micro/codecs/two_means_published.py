"""Two bits a value as published: four levels, set by the standard deviation."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs import blocks
from micro.codecs.base import Codec, Key

LEVELS = 4
RANGE = 6.0  # standard deviations that the levels cover


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTwoMeans(Codec):
    """Values travel as one of four levels of the message, 1.5 standard deviations wide, which decode to their means.

    The levels lie off centre: of what top-k selects, on both sides of zero with nothing near it, most falls into two of
    the four, which then tell no more than a sign does. Each level is a mean, so that with a residual this is sound too.

    Bytes: one for each value, of which two bits are in use, and sixteen for the message.

    Source: the public code of Sarfi et al., SparseLoCo, 2025, arXiv 2508.15706. Differences: a message has one table of
    levels; the code has one for each tensor.
    """

    name: ClassVar[str] = "two_means"
    rule: ClassVar[str] = "published"
    is_default: ClassVar[bool] = False

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return a byte for each value and sixteen for the message."""
        return count + LEVELS * blocks.SCALE_BYTES if count else 0

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return what each level decodes to, then a byte for each value."""
        count = values.numel()
        if not count:
            return values.new_empty(0, dtype=torch.uint8)
        values = blocks.single(values)
        largest = blocks.largest_magnitudes(values, count).clamp_max_(blocks.LARGEST)
        shares = blocks.divided(values, largest, count)  # of magnitude 1 at most: their squares can be added
        centred = shares - _sum(shares) / count
        width = RANGE / LEVELS * blocks.roots(_sum(centred * centred) / max(count - 1, 1))
        steps = blocks.divided(centred, width, count)
        codes = (steps + LEVELS // 2).round_().clamp_(0, LEVELS - 1)
        means = torch.cat([_mean_where(shares, codes == level) for level in range(LEVELS)])
        return blocks.join(means * largest, codes.to(torch.uint8))

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return what the level of each value decodes to."""
        if not count:
            return wire.new_empty(0, dtype=dtype)
        means, codes = blocks.parted(wire, LEVELS)
        return means[codes.to(torch.int64)].to(dtype)


def _sum(values: Tensor) -> Tensor:
    """Return the sum (1,) of ``values``, the same bits on every device."""
    return blocks.sums(values.clone().view(1, -1))


def _mean_where(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean (1,) of the ``chosen`` values; 0 where none is."""
    return _sum(values * chosen) / chosen.sum().clamp_min(1)
