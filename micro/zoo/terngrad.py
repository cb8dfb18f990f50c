"""The codec terngrad (TernGrad): -1, 0 or 1 times a scale, drawn at random."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs import blocks
from micro.codecs.base import Codec, Key
from micro.parts import Rule, check_rule
from micro.values.randomness import uniform, words

DIGITS = 5  # base-3 digits per byte: 3**5 = 243


@dataclass(frozen=True, slots=True, kw_only=True)
class TernGrad(Codec):
    """Send values as -1, 0 or 1: the sign with probability magnitude / largest magnitude of the block, otherwise 0.

    Magnitudes are first clamped to ``clip`` standard deviations.

    Bytes: 1/5 for each value (1.6 bits), four for each block.

    Args:
        rule: 'repaired': codes are decoded with the least-squares factor. The error is never larger than the values,
            and the residual stays within a few times the gradient's norm. 'published': codes are decoded to the block's
            largest magnitude, so the expectation is the (clamped) value. The variance is larger than the squared norm:
            use feedback=none. A residual would grow to ten times the gradient's norm with the exchange gather, and
            hundreds of times with union, which rounds twice.
        clip: limit of magnitudes, in root mean squares of the block; None: no limit.
        block: values that share a scale.

    Raises:
        ValueError: no such rule, clip or block out of range.

    Source: Wen et al., TernGrad, NeurIPS 2017, arXiv 1705.07878. Differences: a scale per block, not per layer, and not
    shared by the ranks; the root mean square replaces the standard deviation, which is zero for equal values; five
    codes per byte; repaired, the decoded factor.
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
        """Return the factor of each block, then the codes."""
        values = blocks.single(values)
        largest = blocks.largest_magnitudes(values, self.block).clamp_max_(blocks.LARGEST)
        shares = blocks.divided(values, largest, self.block)  # at most 1 in magnitude: squares cannot overflow
        limits = self._limits(shares)
        drawn = uniform(words(*key), values.numel(), values.device)
        codes = (blocks.divided(shares, limits, self.block).abs_() > drawn).to(torch.float32).mul_(shares.sign())
        worth = limits if self.rule == "published" else blocks.least_squares(shares, codes, self.block)
        return blocks.join(worth * largest, pack_ternary(codes))

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the codes times their block's factor."""
        worth, packed = blocks.parted(wire, blocks.num_blocks(count, self.block))
        return blocks.multiply_(unpack_ternary(packed, count), worth, self.block).to(dtype)

    def _limits(self, shares: Tensor) -> Tensor:
        """Return the largest magnitude of every block after clamping."""
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
    """Return the (count,) codes from ``pack_ternary``, as float32."""
    columns = torch.empty(packed.numel(), DIGITS, device=packed.device)
    rest = packed.clone()
    for place in range(DIGITS):
        columns[:, place] = rest % 3
        rest.floor_divide_(3)
    return columns.view(-1)[:count].sub_(1)
