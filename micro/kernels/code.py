"""Which codes of values have compiled forms, and how their messages lie."""

from enum import IntEnum
from typing import NamedTuple

SCALE_BYTES = 4


class Kind(IntEnum):
    """How values are coded; `micro.codecs` says it in torch."""

    HALF = 0
    BFLOAT16 = 1
    INT8 = 2
    SIGN = 3


class Code(NamedTuple):
    """A code and the number of values that share a scale, where they do.

    A message is the float32 scales of its blocks, then the codes.
    """

    kind: Kind
    block: int = 256

    def scale_bytes(self, count: int) -> int:
        """Return the bytes of the scales of ``count`` values."""
        return 0 if self.kind in (Kind.HALF, Kind.BFLOAT16) else SCALE_BYTES * -(-count // self.block)
