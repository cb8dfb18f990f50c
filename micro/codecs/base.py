"""What a codec is: the bytes in which values travel."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from micro.parts import Part

Key = tuple[int, ...]  # what the randomness of an encoding depends on: (seed, step, rank, place in the message)


class Codec(Part, ABC):
    """A form of values on the wire. ``decode(encode(x))`` is what the receivers get; the rest stays in the residual.

    What is sent has as many bytes as its number of values says, so receivers need no further message. No values take
    no bytes.
    """

    kind: ClassVar[str] = "codec"
    home: ClassVar[str] = "micro.codecs"
    group: ClassVar[str] = "micro.codecs"
    lossless: ClassVar[bool] = False
    diverges_with_feedback: ClassVar[bool] = False  # its errors exceed what it is given: a residual would grow

    @abstractmethod
    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return the bytes that ``count`` values take, which are accumulated as ``dtype``."""

    @abstractmethod
    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return finite ``values`` (count,) as they travel: (num_bytes,) uint8.

        Args:
            key: seeds what is random about it: the same key gives the same bytes.
        """

    @abstractmethod
    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return what ``encode`` made of ``count`` values as finite numbers (count,) of ``dtype``."""

    def decode_into_(self, wire: Tensor, values: Tensor) -> None:
        """Fill ``values`` (count,) with what ``decode`` returns of as many."""
        values.copy_(self.decode(wire, values.numel(), values.dtype))


def to_bytes(x: Tensor) -> Tensor:
    """Return the memory of 1-D ``x`` as uint8."""
    return x.contiguous().view(torch.uint8)


def from_bytes(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uint8 ``wire`` read as ``dtype``; copied only where it lies at an odd place of a larger message."""
    if wire.storage_offset() % dtype.itemsize:
        wire = wire.clone()
    return wire.view(dtype)
