"""Two bits a value: its sign, and one of two magnitudes of its block."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.bits import num_packed_bytes, pack, unpack
from micro.codecs import blocks
from micro.codecs.base import Codec, Key

BITS = 2
ROUNDS = 3  # of Lloyd's algorithm; from the third on the error hardly falls


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoMeans(Codec):
    """Values travel as their sign and one bit that says which of two magnitudes of their block is nearer.

    The magnitudes are the means of those that they stand for, found by Lloyd's algorithm. So what is left of a block is
    never larger than the block, and with a residual this is sound. What top-k selects lies on both sides of zero, with
    nothing near it: two magnitudes with a sign fit that. Zero counts as positive.

    Bytes: a quarter for each value, eight for each block.

    Args:
        block: values that share two magnitudes.

    Raises:
        ValueError: block is less than 1.

    Source: the two bits are those of Sarfi et al., SparseLoCo, 2025, arXiv 2508.15706. Differences: its public code
    sets four levels by the standard deviation; see `PublishedTwoMeans`. Lloyd, IEEE Trans. Information Theory 1982.
    """

    block: int = 1024
    name: ClassVar[str] = "two_means"
    rule: ClassVar[str] = "repaired"

    def __post_init__(self) -> None:
        blocks.check_block(self.name, self.block)

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return two bits for each value, in whole bytes, and eight bytes for each block."""
        return num_packed_bytes(count, BITS) + 2 * blocks.SCALE_BYTES * blocks.num_blocks(count, self.block)

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return the smaller magnitudes of the blocks, the larger ones, then the codes: 2 if negative, 1 if larger."""
        if not values.numel():
            return values.new_empty(0, dtype=torch.uint8)
        values = blocks.single(values)
        largest = blocks.largest_magnitudes(values, self.block).clamp_max_(blocks.LARGEST)
        shares = blocks.divided(values, largest, self.block).abs_()  # of 1 at most: they can be added
        means = _two_means(shares, self.block)
        codes = _is_larger(shares, means, self.block).to(torch.int32)
        codes += 2 * (values < 0)
        return blocks.join(torch.cat([mean * largest for mean in means]), pack(codes, BITS))

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return plus or minus one of the magnitudes of each value's block."""
        if not count:
            return wire.new_empty(0, dtype=dtype)
        num_blocks = blocks.num_blocks(count, self.block)
        magnitudes, packed = blocks.parted(wire, 2 * num_blocks)
        codes = unpack(packed, count, BITS)
        larger, signs = (codes & 1).to(torch.float32), (1 - (codes & 2)).to(torch.float32)
        values = blocks.multiply_(1 - larger, magnitudes[:num_blocks], self.block)
        return values.add_(blocks.multiply_(larger, magnitudes[num_blocks:], self.block)).mul_(signs).to(dtype)


def _two_means(magnitudes: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the two means of the magnitudes of every block (num_blocks,), the smaller ones first."""
    everything = torch.ones_like(magnitudes, dtype=torch.bool)
    middle = _mean_where(magnitudes, everything, block)
    for _ in range(ROUNDS):
        upper = _at_least(magnitudes, middle, block)
        means = _mean_where(magnitudes, ~upper, block), _mean_where(magnitudes, upper, block)
        middle = (means[0] + means[1]) / 2
    return means


def _is_larger(magnitudes: Tensor, means: tuple[Tensor, Tensor], block: int) -> Tensor:
    """Return (count,) bool: which magnitudes are nearer to the larger mean of their block."""
    return _at_least(magnitudes, (means[0] + means[1]) / 2, block)


def _at_least(values: Tensor, cuts: Tensor, block: int) -> Tensor:
    """Return (count,) bool: which values reach the cut of their block."""
    parts = blocks.rows(values, block)
    given = cuts[:, None].split([part.shape[0] for part in parts])
    return torch.cat([(part >= cut).view(-1) for part, cut in zip(parts, given, strict=True)])


def _mean_where(values: Tensor, chosen: Tensor, block: int) -> Tensor:
    """Return the mean of the ``chosen`` values of every block (num_blocks,); 0 where none is."""

    def mean(rows: Tensor, mask: Tensor) -> Tensor:
        counts = mask.sum(1, dtype=torch.float32)
        return blocks.sums((rows * mask) / counts.clamp_min(1)[:, None])

    return blocks.of_blocks(mean, block, values, chosen)
