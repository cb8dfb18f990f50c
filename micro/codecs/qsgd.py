"""The QSGD codec: integer levels of each bucket's scale, with stochastic rounding."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs import blocks
from micro.codecs.base import Codec, Key
from micro.codecs.bits import num_packed_bytes, pack, unpack
from micro.kernels.code import Code, Kind
from micro.parts import Rule, check_rule
from micro.values.randomness import uniform, words


@dataclass(frozen=True, slots=True, kw_only=True)
class QSGD(Codec):
    """Send values as integer levels, -s to s with s = 2**(bits-1) - 1, of their bucket's scale, rounded at random.

    Bytes: bits / 8 for each value, four for each bucket.

    Args:
        rule: 'repaired': the highest level is the bucket's largest magnitude, so all levels are used; they are decoded
            with the least-squares factor. The error is never larger than the values, so the residual stays bounded with
            any number of bits. 'published': levels of the bucket's Euclidean norm; unbiased. The variance is up to
            min(bucket / s**2, sqrt(bucket) / s) times the squared norm, 3.2 with the defaults. Use it with
            feedback=none: a residual grows without bound, by orders of magnitude in 100 steps.
        bits: bits per value, sign included, 2 to 16.
        block: values per bucket.

    Raises:
        ValueError: no such rule, bits or block out of range.

    Source: Alistarh et al., QSGD, NeurIPS 2017, arXiv 1610.02132. Differences: codes of fixed length instead of Elias
    codes, so that the length is not sent; with rule 'repaired', other scales for encoding and decoding.
    """

    rule: Rule = "repaired"
    bits: int = 4
    block: int = 512
    name: ClassVar[str] = "qsgd"

    def __post_init__(self) -> None:
        check_rule(self)
        blocks.check_block(self.name, self.block)
        if not 2 <= self.bits <= 16:
            raise ValueError(f"bits of {self.name} must be in 2 to 16, got {self.bits}")

    @property
    def code(self) -> Code | None:
        """The code for the compiled loops."""
        return Code(Kind.LEVELS, self.block, width=self.bits, is_published=self.rule == "published")

    @property
    def diverges_with_feedback(self) -> bool:
        """Whether a residual would grow."""
        return self.rule == "published"

    @property
    def num_levels(self) -> int:
        """Number of levels above zero."""
        return (1 << (self.bits - 1)) - 1

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return the packed bits of the values, in whole bytes, plus four bytes per bucket."""
        return num_packed_bytes(count, self.bits) + blocks.SCALE_BYTES * blocks.num_blocks(count, self.block)

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return the value of one level in each bucket, then the levels."""
        values = blocks.single(values)
        largest = blocks.largest_magnitudes(values, self.block).clamp_max_(blocks.LARGEST)
        shares = blocks.divided(values, largest, self.block)  # at most 1 in magnitude: squares cannot overflow
        repaired, count = self.rule == "repaired", blocks.num_blocks(values.numel(), self.block)
        scales = shares.new_ones(count) if repaired else blocks.of_blocks(_norm, self.block, shares)
        levels = blocks.divided(shares, scales, self.block).mul_(self.num_levels)
        levels.add_(uniform(words(*key), values.numel(), values.device)).floor_()
        levels.clamp_(-self.num_levels, self.num_levels)
        worth = blocks.least_squares(shares, levels, self.block) if repaired else blocks.over(scales, self.num_levels)
        codes = pack(levels.add_(self.num_levels), self.bits)
        return blocks.join(worth * largest, codes, highest=self.num_levels)

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the levels times the value of one level."""
        worth, packed = blocks.parted(wire, blocks.num_blocks(count, self.block))
        levels = unpack(packed, count, self.bits).to(torch.float32).sub_(self.num_levels)
        return blocks.multiply_(levels, worth, self.block).to(dtype)


def _norm(rows: Tensor) -> Tensor:
    return blocks.roots(blocks.sums(rows * rows))
