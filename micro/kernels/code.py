"""The codecs with compiled loops, and the layout of their messages."""

from enum import IntEnum
from typing import NamedTuple

SCALE_BYTES = 4


class Kind(IntEnum):
    """How values are coded; `micro.codecs` says it in torch."""

    HALF = 0
    BFLOAT16 = 1
    INT8 = 2
    LEVELS = 3  # codec qsgd


class Code(NamedTuple):
    """A code and its settings. A message is the float32 scales of its blocks, if it has any, then the codes.

    Attributes:
        block: values that share a scale.
        width: bits of a value, for LEVELS.
        is_published: the rule of LEVELS.
    """

    kind: Kind
    block: int = 256
    width: int = 8
    is_published: bool = False

    def scale_bytes(self, count: int) -> int:
        """Return the bytes ahead of the codes of ``count`` values."""
        return SCALE_BYTES * -(-count // self.block) if self.kind in (Kind.INT8, Kind.LEVELS) else 0
