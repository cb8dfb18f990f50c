"""QSGD: a few levels of each bucket's norm, rounded at random."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.bits import num_packed_bytes, pack, unpack
from micro.codecs import blocks
from micro.codecs.base import Codec, Key
from micro.parts import Rule, check_rule
from micro.randomness import generator


@dataclass(frozen=True, slots=True, kw_only=True)
class QSGD(Codec):
    """Values travel as whole levels, -s to s with s = 2**(bits-1) - 1, of a scale of their bucket, rounded at random.

    ``rule='published'``: levels of the bucket's Euclidean norm, whose mean over draws is the value. The variance is up
    to min(bucket / s**2, sqrt(bucket) / s) times the squared norm, 3.2 with the defaults: for use with
    feedback=none. A residual under it grows without bound: with the defaults, by orders of magnitude in 100 steps.

    ``rule='repaired'``: levels of the bucket's largest magnitude, so that all of them are in use, decoded by the
    factor that leaves the smallest error (least squares). What is left is never larger than what was there, so the
    residual stays bounded at any number of bits.

    Bytes: bits / 8 for each value, four for each bucket.

    Args:
        bits: of a value, sign included, 2 to 16.
        block: values of a bucket.

    Raises:
        ValueError: bits or block out of range, or no such rule.

    Source: Alistarh et al., QSGD, NeurIPS 2017, arXiv 1610.02132. Differences: codes of fixed length instead of Elias
    codes, so that their length need not travel.
    """

    bits: int = 4
    block: int = 512
    rule: Rule = "repaired"
    name: ClassVar[str] = "qsgd"

    def __post_init__(self) -> None:
        check_rule(self)
        blocks.check_block(self.name, self.block)
        if not 2 <= self.bits <= 16:
            raise ValueError(f"bits of {self.name} must be in 2 to 16, got {self.bits}")

    @property
    def num_levels(self) -> int:
        """Number of levels above zero."""
        return 2 ** (self.bits - 1) - 1

    @property
    def is_for_no_feedback(self) -> bool:
        """Whether this is the published rule, whose variance exceeds what error feedback can bear."""
        return self.rule == "published"

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return the bits of the values, in whole bytes, and four bytes for each bucket."""
        return num_packed_bytes(count, self.bits) + blocks.SCALE_BYTES * blocks.num_blocks(count, self.block)

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return what a level of each bucket is worth, then the levels."""
        if not values.numel():
            return values.new_empty(0, dtype=torch.uint8)
        values = blocks.single(values)
        largest = blocks.largest_magnitudes(values, self.block).clamp_max_(blocks.LARGEST)
        shares = blocks.divided(values, largest, self.block)  # of magnitude 1 at most: their squares can be added
        norms = torch.ones_like(largest) if self.rule == "repaired" else blocks.of_blocks(_norm, self.block, shares)
        levels = blocks.divided(shares, norms, self.block).mul_(self.num_levels)
        levels.add_(torch.rand(values.numel(), generator=generator(*key)).to(values.device)).floor_()
        levels.clamp_(-self.num_levels, self.num_levels)
        repaired = self.rule == "repaired"
        worth = blocks.least_squares(shares, levels, self.block) if repaired else norms / self.num_levels
        codes = pack(levels.add_(self.num_levels), self.bits)
        return blocks.join(worth * largest, codes, highest=self.num_levels)

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the levels times what they are worth."""
        worth, packed = blocks.parted(wire, blocks.num_blocks(count, self.block))
        levels = unpack(packed, count, self.bits).to(torch.float32).sub_(self.num_levels)
        return blocks.multiply_(levels, worth, self.block).to(dtype)


def _norm(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1)
