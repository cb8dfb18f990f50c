"""The base class of codecs, which encode values as bytes."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from micro.kernels.code import Code
from micro.parts import Part

Key = tuple[int, ...]  # seeds random rounding: (seed, step, rank, number of the part)


class Codec(Part, ABC):
    """An encoding of values. Receivers get ``decode(encode(x))``; the rounding error stays in the residual.

    The length of a message depends only on the number of values, so receivers know it. A codec has three methods in
    torch, for every device and dtype and at least one value; no values need no bytes. If it also has compiled loops,
    `micro.codecs.coding` uses them; they return the same bits.
    """

    kind: ClassVar[str] = "codec"
    home: ClassVar[str] = "micro.codecs"
    group: ClassVar[str] = "micro.codecs"
    lossless: ClassVar[bool] = False

    @property
    def code(self) -> Code | None:
        """The code for the compiled loops; None if there are none."""
        return None

    @property
    def diverges_with_feedback(self) -> bool:
        """Whether its error can exceed its input, so that a residual would grow."""
        return False

    @abstractmethod
    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return the bytes of ``count`` encoded values; ``dtype`` is that of the accumulator."""

    @abstractmethod
    def encode(self, values: Tensor, key: Key) -> Tensor:
        """Return finite ``values`` (count,) as a message (num_bytes,) uint8.

        Args:
            key: seeds random rounding: the same key gives the same bytes.
        """

    @abstractmethod
    def decode(self, wire: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Return the ``count`` values of a message of ``encode``, finite, (count,) of ``dtype``."""


def to_bytes(x: Tensor) -> Tensor:
    """Return the memory of 1-D ``x`` as uint8."""
    return x.contiguous().view(torch.uint8)


def from_bytes(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uint8 ``wire`` viewed as ``dtype``; copied only if it is not aligned in a larger message."""
    if wire.storage_offset() % dtype.itemsize:
        wire = wire.clone()
    return wire.view(dtype)
