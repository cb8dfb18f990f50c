"""Which codes of values have compiled forms, and how their messages lie."""

import math
from enum import IntEnum
from typing import NamedTuple

SCALE_BYTES = 4
DIGITS = 5  # of base 3 that fit into a byte: 3**5 = 243


class Kind(IntEnum):
    """How values are coded; `micro.codecs` and `micro.zoo` say it in torch."""

    HALF = 0
    BFLOAT16 = 1
    INT8 = 2
    SIGN = 3
    SIDES = 4  # codec onebit: a mean for each side of zero
    LEVELS = 5  # codec qsgd
    TERNARY = 6  # codec terngrad
    POWERS = 7  # codec natural


SCALES = {Kind.HALF: 0, Kind.BFLOAT16: 0, Kind.SIDES: 2}  # of a block, where it is not one


class Code(NamedTuple):
    """A code and its settings. A message is the float32 scales of its blocks, then the codes.

    Attributes:
        block: values that share a scale.
        width: bits of a value, for LEVELS.
        clip: for TERNARY; 0: nowhere.
        is_published: the rule of LEVELS, TERNARY and POWERS.
    """

    kind: Kind
    block: int = 256
    width: int = 8
    clip: float = 0.0
    is_published: bool = False

    @property
    def has_header(self) -> bool:
        """Whether a number of the whole message comes first, in place of scales: all values are seen before it."""
        return self.kind is Kind.POWERS

    @property
    def is_random(self) -> bool:
        """Whether values are rounded at random."""
        return self.kind in (Kind.LEVELS, Kind.TERNARY) or (self.has_header and self.is_published)

    @property
    def unit(self) -> int:
        """Values, a multiple of the block, whose codes fill whole bytes."""
        return math.lcm(self.block, DIGITS) if self.kind is Kind.TERNARY else self.block

    def scale_bytes(self, count: int) -> int:
        """Return the bytes ahead of the codes of ``count`` values."""
        return SCALE_BYTES * (1 if self.has_header else SCALES.get(self.kind, 1) * -(-count // self.block))
