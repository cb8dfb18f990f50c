"""TernGrad: minus one, zero or one times a scale, drawn at random."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs import blocks
from micro.codecs.base import Codec, Key
from micro.parts import Rule, check_rule
from micro.values.randomness import uniform, words

DIGITS = 5  # of base 3 that fit into a byte: 3**5 = 243


@dataclass(frozen=True, slots=True, kw_only=True)
class TernGrad(Codec):
    """Values travel as -1, 0 or 1: their sign with a probability of their share of the block's largest magnitude.

    Magnitudes are cut at ``clip`` standard deviations before that.

    Bytes: a fifth for each value, which is 1.6 bits, and four for each block.

    Args:
        rule: 'repaired': a code counts for the factor that leaves the smallest error (least squares). What is left is
            never larger than what was there, and the residual stays within a few times the gradient's norm.
            'published': it counts for the block's largest magnitude, so that the mean over draws is the (cut) value.
            The variance is larger than the squared norm: for use with feedback=none. A residual under it grows, to ten
            times the gradient's norm with the exchange gather, and to hundreds of times with union, which rounds twice.
        clip: where magnitudes are cut, in root mean squares of the block; None: nowhere.
        block: values that share a scale.

    Raises:
        ValueError: no such rule, clip or block out of range.

    Source: Wen et al., TernGrad, NeurIPS 2017, arXiv 1705.07878. Differences: a scale for each block instead of
    each layer, and no agreement of the ranks on it; the root mean square stands for the standard deviation, which is
    zero for equal values; five codes in a byte; repaired, what a code counts for.
    """

    rule: Rule = "repaired"
    clip: float | None = 2.5
    block: int = 1024
    name: ClassVar[str] = "terngrad"

    def __post_init__(self) -> None:
        check_rule(self)
        blocks.check_block(self.name, self.block)
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ValueError(f"clip of {self.name} must be positive, got {self.clip}")

    @property
    def diverges_with_feedback(self) -> bool:
        """Whether a residual would grow."""
        return self.rule == "published"

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return a byte for five values and four for each block."""
        return -(-count // DIGITS) + blocks.SCALE_BYTES * blocks.num_blocks(count, self.block)

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return what a code of each block is worth, then the codes."""
        values = blocks.single(values)
        largest = blocks.largest_magnitudes(values, self.block).clamp_max_(blocks.LARGEST)
        shares = blocks.divided(values, largest, self.block)  # of magnitude 1 at most: their squares can be added
        limits = self._limits(shares)
        drawn = uniform(words(*key), values.numel(), values.device)
        codes = (blocks.divided(shares, limits, self.block).abs_() > drawn).to(torch.float32).mul_(shares.sign())
        worth = limits if self.rule == "published" else blocks.least_squares(shares, codes, self.block)
        return blocks.join(worth * largest, pack_ternary(codes))

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the codes times what they are worth."""
        worth, packed = blocks.parted(wire, blocks.num_blocks(count, self.block))
        return blocks.multiply_(unpack_ternary(packed, count), worth, self.block).to(dtype)

    def _limits(self, shares: Tensor) -> Tensor:
        """Return the largest magnitude of every block after the cut."""
        clip = self.clip
        if clip is None:
            return blocks.largest_magnitudes(shares, self.block)
        return blocks.of_blocks(
            lambda x: (blocks.roots(blocks.over(blocks.sums(x * x), x.shape[1])) * clip).clamp_max_(1),
            self.block,
            shares,
        )


def pack_ternary(codes: Tensor) -> Tensor:
    """Return ``codes`` (m,), each -1, 0 or 1, five to a byte: (ceil(m / 5),) uint8, the first as the lowest digit."""
    digits = torch.zeros(-(-codes.numel() // DIGITS) * DIGITS, dtype=torch.uint8, device=codes.device)
    digits[: codes.numel()] = codes.to(torch.int8).add_(1)
    columns = digits.view(-1, DIGITS)
    packed = columns[:, DIGITS - 1].clone()
    for place in reversed(range(DIGITS - 1)):
        packed.mul_(3).add_(columns[:, place])
    return packed


def unpack_ternary(packed: Tensor, count: int) -> Tensor:
    """Return the (count,) codes that ``pack_ternary`` laid together, as float32."""
    columns = torch.empty(packed.numel(), DIGITS, device=packed.device)
    rest = packed.clone()
    for place in range(DIGITS):
        columns[:, place] = rest % 3
        rest.floor_divide_(3)
    return columns.view(-1)[:count].sub_(1)
