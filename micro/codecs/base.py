"""What a codec is: the bytes in which values travel."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from micro.kernels.code import Code
from micro.parts import Part

Key = tuple[int, ...]  # what the randomness of an encoding depends on: (seed, step, rank, place in the message)


class Codec(Part, ABC):
    """A form of values on the wire. ``decode(encode(x))`` is what the receivers get; the rest stays in the residual.

    What is sent has as many bytes as its number of values says, so receivers need no further message. A codec is three
    methods in torch, for every device and dtype, of one value or more: no values take no bytes. Where it has a compiled
    form too, `micro.codecs.coding` uses that: it gives the same bits.
    """

    kind: ClassVar[str] = "codec"
    home: ClassVar[str] = "micro.codecs"
    group: ClassVar[str] = "micro.codecs"
    lossless: ClassVar[bool] = False

    @property
    def code(self) -> Code | None:
        """The compiled form of it; None where there is none."""
        return None

    @property
    def diverges_with_feedback(self) -> bool:
        """Whether its errors exceed what it is given, so that a residual would grow."""
        return False

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


def to_bytes(x: Tensor) -> Tensor:
    """Return the memory of 1-D ``x`` as uint8."""
    return x.contiguous().view(torch.uint8)


def from_bytes(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uint8 ``wire`` read as ``dtype``; copied only where it lies at an odd place of a larger message."""
    if wire.storage_offset() % dtype.itemsize:
        wire = wire.clone()
    return wire.view(dtype)
