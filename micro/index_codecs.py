"""What indices look like on the wire."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs.base import from_bytes, to_bytes
from micro.parts import Part


class IndexCodec(Part, ABC):
    """A lossless form of ascending, unique indices on the wire.

    What is sent has as many bytes as the number of indices and the length of their range say, so receivers need no
    further message. No indices take no bytes.
    """

    kind: ClassVar[str] = "indices"
    home: ClassVar[str] = "micro.index_codecs"

    @abstractmethod
    def num_bytes(self, count: int, span: int) -> int:
        """Return the bytes that ``count`` indices in [0, span) take."""

    @abstractmethod
    def encode(self, indices: Tensor, span: int) -> Tensor:
        """Return ascending, unique ``indices`` (count,) int32 in [0, span) as they travel: (num_bytes,) uint8."""

    @abstractmethod
    def decode(self, wire: Tensor, count: int, span: int) -> Tensor:
        """Return the (count,) int32 indices that ``encode`` was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int32(IndexCodec):
    """Indices travel as int32: four bytes each."""

    name: ClassVar[str] = "int32"

    def num_bytes(self, count: int, span: int) -> int:
        """Return four bytes for each index."""
        return 4 * count

    def encode(self, indices: Tensor, span: int) -> Tensor:
        """Return the indices' own memory."""
        return to_bytes(indices)

    def decode(self, wire: Tensor, count: int, span: int) -> Tensor:
        """Return the indices themselves."""
        return from_bytes(wire, torch.int32)
