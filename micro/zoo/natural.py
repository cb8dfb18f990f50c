"""Natural compression: sign and power of two."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs import blocks
from micro.codecs.base import Codec, Key, from_bytes, to_bytes
from micro.kernels.code import Code, Kind
from micro.parts import Rule, check_rule
from micro.randomness import mantissas, words

MANTISSA = 23  # bits of a single-precision number below its exponent
NEGATIVE = 128
NUM_POWERS = 127  # below the sign bit, beside zero
HIGHEST = 254  # the exponent field of 2**127, the largest power of two
HEADER_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Natural(Codec):
    """Values travel as sign and power of two, eight bits: 127 powers that end at the largest of the message, and zero.

    What is less than 2**-126 of the largest is zero; powers above 2**127 are cut there.

    Bytes: one for each value, four for the message.

    Args:
        rule: 'repaired': a value is rounded to the nearer power; the squared error is at most 1/9 of the squared norm,
            without noise. 'published': it is rounded at random to one of the two powers around it, so that the mean
            over draws is the value. The variance is at most 1/8 of the squared norm, so a residual stays bounded too.

    Source: Horvath et al., Natural Compression for Distributed Deep Learning, arXiv 1905.10988. Differences: the powers
    end at the message's largest, so that none of the seven bits is spent above it; repaired, no randomness.

    Raises:
        ValueError: no such rule.
    """

    rule: Rule = "repaired"
    name: ClassVar[str] = "natural"

    def __post_init__(self) -> None:
        check_rule(self)

    @property
    def code(self) -> Code | None:
        """The compiled form."""
        return Code(Kind.POWERS, is_published=self.rule == "published")

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return a byte for each value and four for the message."""
        return HEADER_BYTES + count if count else 0

    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return the exponent below the smallest power's, then sign and exponent of each value."""
        if not values.numel():
            return values.new_empty(0, dtype=torch.uint8)
        values = blocks.single(values)
        exponents = _rounded(values.view(torch.int32) & 0x7FFFFFFF, self._dither(values, key))
        below = (exponents.max() - NUM_POWERS).clamp_min(0)
        codes = exponents.sub_(below)
        codes.masked_fill_(codes < 0, 0)
        codes |= (values < 0).to(torch.int32) * NEGATIVE
        return torch.cat([to_bytes(below.view(1)), codes.to(torch.uint8)])

    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the powers with their signs."""
        if not count:
            return wire.new_empty(0, dtype=dtype)
        below, codes = from_bytes(wire[:HEADER_BYTES], torch.int32), wire[HEADER_BYTES:].to(torch.int32)
        exponents = codes & NUM_POWERS
        powers = (exponents + below).mul_(exponents > 0) << MANTISSA
        return powers.view(torch.float32).mul_(1 - 2 * (codes >> 7)).to(dtype)

    def _dither(self, values: Tensor, key: Key) -> Tensor | int:
        """Return what is added to the mantissas: where that carries, the exponent goes up."""
        if self.rule == "published":
            return mantissas(words(*key), values.numel(), values.device)
        return 1 << (MANTISSA - 1)


def _rounded(patterns: Tensor, dither: Tensor | int) -> Tensor:
    """Return the exponent fields of single-precision numbers after rounding: the number is 2**e (1 + mantissa / 2**23).

    A mantissa of m carries with m of 2**23 values of the dither, which is what the distance from the lower power says.
    """
    return patterns.add_(dither).bitwise_right_shift_(MANTISSA).clamp_max_(HIGHEST)
