"""The two-means codec: two bits per value, its sign and one of two magnitudes of its block."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs import blocks
from micro.codecs.base import Codec, Key
from micro.codecs.bits import num_packed_bytes, pack, unpack
from micro.parts import Rule, check_rule

BITS = 2
LEVELS = 4  # as in the public code
RANGE = 6.0  # standard deviations that the levels cover
ROUNDS = 3  # rounds of Lloyd's algorithm; more hardly reduce the error


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoMeans(Codec):
    """Send the sign of each value and one bit for the nearer of two magnitudes of its block.

    Lloyd's algorithm finds the two magnitudes, each the mean of the values that it replaces. So the error is never
    larger than the block, and error feedback converges. The values selected by top-k lie on both sides of zero with
    none near it, which two signed magnitudes fit well. Zero counts as positive.

    Bytes: 1/4 for each value, eight for each block.

    Args:
        rule: 'repaired', or 'published' as in the public code: four levels per message, each 1.5 standard deviations
            wide, decoded to their means. A value takes a byte, of which it uses two bits; a message, 16 bytes more. The
            levels are off centre: most values selected by top-k fall into two of the four, which carry only the sign.
        block: values that share two magnitudes; for rule 'repaired'.

    Raises:
        ValueError: no such rule, or block is less than 1.

    Source: the two bits are those of Sarfi et al., SparseLoCo, 2025, arXiv 2508.15706, and its public code.
    Differences: repaired, levels by Lloyd's algorithm, IEEE Trans. Information Theory 1982; published, one table of
    levels per message (the code: per tensor).
    """

    rule: Rule = "repaired"
    block: int = 1024
    name: ClassVar[str] = "two_means"

    def __post_init__(self) -> None:
        check_rule(self)
        blocks.check_block(self.name, self.block)

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return two bits for each value, in whole bytes, and eight bytes for each block; see ``rule``."""
        if self.rule == "published":
            return count + LEVELS * blocks.SCALE_BYTES if count else 0
        return num_packed_bytes(count, BITS) + 2 * blocks.SCALE_BYTES * blocks.num_blocks(count, self.block)

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return the smaller magnitudes of the blocks, the larger ones, then the codes: 2 if negative, 1 if larger."""
        values = blocks.single(values)
        if self.rule == "published":
            return _encode_levels(values)
        largest = blocks.largest_magnitudes(values, self.block).clamp_max_(blocks.LARGEST)
        shares = blocks.divided(values, largest, self.block).abs_()  # at most 1: the sum cannot overflow
        means = _two_means(shares, self.block)
        codes = _is_larger(shares, means, self.block).to(torch.int32)
        codes += 2 * (values < 0)
        return blocks.join(torch.cat([mean * largest for mean in means]), pack(codes, BITS))

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return plus or minus one of the magnitudes of each value's block."""
        if self.rule == "published":
            means, levels = blocks.parted(wire, LEVELS)
            return means[levels.to(torch.int64)].to(dtype)
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
    """Return the mean of the ``chosen`` values of every block (num_blocks,); 0 if none is chosen."""

    def mean(rows: Tensor, mask: Tensor) -> Tensor:
        counts = mask.sum(1, dtype=torch.float32)
        return blocks.sums((rows * mask) / counts.clamp_min(1)[:, None])

    return blocks.of_blocks(mean, block, values, chosen)


def _encode_levels(values: Tensor) -> Tensor:
    """Return the decoded value of each level of the public code, then a byte for each value."""
    count = values.numel()
    largest = blocks.largest_magnitudes(values, count).clamp_max_(blocks.LARGEST)
    shares = blocks.divided(values, largest, count)  # at most 1 in magnitude: squares cannot overflow
    centred = shares - blocks.over(_sum(shares), count)
    width = RANGE / LEVELS * blocks.roots(blocks.over(_sum(centred * centred), max(count - 1, 1)))
    steps = blocks.divided(centred, width, count)
    codes = (steps + LEVELS // 2).round_().clamp_(0, LEVELS - 1)
    means = torch.cat([_mean_of(shares, codes == level) for level in range(LEVELS)])
    return blocks.join(means * largest, codes.to(torch.uint8))


def _sum(values: Tensor) -> Tensor:
    """Return the sum (1,) of ``values``, the same bits on every device."""
    return blocks.sums(values.clone().view(1, -1))


def _mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean (1,) of the ``chosen`` values; 0 if none is chosen."""
    return _sum(values * chosen) / chosen.sum().clamp_min(1)
