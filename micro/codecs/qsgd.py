"""QSGD: a few levels of each bucket's norm, rounded at random."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.bits import num_packed_bytes, pack, unpack
from micro.codecs import blocks
from micro.codecs.base import Key
from micro.codecs.fused import FusedCodec
from micro.randomness import uniform, words


@dataclass(frozen=True, slots=True, kw_only=True)
class QSGD(FusedCodec):
    """Values travel as whole levels, -s to s with s = 2**(bits-1) - 1, of a scale of their bucket, rounded at random.

    The highest level is the bucket's largest magnitude, so that all levels are in use; they are decoded by the factor
    that leaves the smallest error (least squares). What is left is never larger than what was there, so the residual
    stays bounded at any number of bits.

    Bytes: bits / 8 for each value, four for each bucket.

    Args:
        bits: of a value, sign included, 2 to 16.
        block: values of a bucket.

    Raises:
        ValueError: bits or block out of range.

    Source: Alistarh et al., QSGD, NeurIPS 2017, arXiv 1610.02132. Differences: the scale of the levels and of what they
    are decoded to; codes of fixed length instead of Elias codes, so that their length need not travel. `PublishedQSGD`
    scales by the norm.
    """

    bits: int = 4
    block: int = 512
    name: ClassVar[str] = "qsgd"
    rule: ClassVar[str] = "repaired"

    def __post_init__(self) -> None:
        blocks.check_block(self.name, self.block)
        if not 2 <= self.bits <= 16:
            raise ValueError(f"bits of {self.name} must be in 2 to 16, got {self.bits}")

    @property
    def num_levels(self) -> int:
        """Number of levels above zero."""
        return (1 << (self.bits - 1)) - 1

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return the bits of the values, in whole bytes, and four bytes for each bucket."""
        return num_packed_bytes(count, self.bits) + blocks.SCALE_BYTES * blocks.num_blocks(count, self.block)

    def encode_in_torch(self, values: Tensor, key: Key) -> Tensor:
        """Return what a level of each bucket is worth, then the levels."""
        values = blocks.single(values)
        largest = blocks.largest_magnitudes(values, self.block).clamp_max_(blocks.LARGEST)
        shares = blocks.divided(values, largest, self.block)  # of magnitude 1 at most: their squares can be added
        scales = self._scales(shares)
        levels = blocks.divided(shares, scales, self.block).mul_(self.num_levels)
        levels.add_(uniform(words(*key), values.numel(), values.device)).floor_()
        levels.clamp_(-self.num_levels, self.num_levels)
        worth = self._worth(shares, levels, scales)
        codes = pack(levels.add_(self.num_levels), self.bits)
        return blocks.join(worth * largest, codes, highest=self.num_levels)

    def decode_in_torch(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the levels times what they are worth."""
        worth, packed = blocks.parted(wire, blocks.num_blocks(count, self.block))
        levels = unpack(packed, count, self.bits).to(torch.float32).sub_(self.num_levels)
        return blocks.multiply_(levels, worth, self.block).to(dtype)

    def encoding(self, loops: ModuleType, wire: Tensor, count: int, key: Key) -> Any:
        """Return how ``wire`` is filled by ``loops``."""
        settings = {"block": self.block, "bits": self.bits, "is_least_squares": self.rule == "repaired"}
        return loops.encode_levels(wire, count, words(*key), **settings)

    def decoding(self, loops: ModuleType, wires: Tensor, count: int, divisor: float) -> Any:
        """Return how the sum of ``wires`` is read by ``loops``."""
        return loops.decode_levels(wires, count, divisor, block=self.block, bits=self.bits)

    def _scales(self, shares: Tensor) -> Tensor:
        """Return the magnitude that the highest level of each bucket stands for, in units of its largest magnitude."""
        return shares.new_ones(blocks.num_blocks(shares.numel(), self.block))

    def _worth(self, shares: Tensor, levels: Tensor, scales: Tensor) -> Tensor:
        """Return what a level of each bucket is decoded to, in units of its largest magnitude."""
        return blocks.least_squares(shares, levels, self.block)
