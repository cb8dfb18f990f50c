"""Codecs for indices: int32, bitmap, packed (Elias-Fano), or the shortest of them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs.base import from_bytes, to_bytes
from micro.codecs.bits import get_places, num_packed_bytes, put_places
from micro.parts import Part

Spans = Sequence[tuple[int, int]]  # (start, stop) of a range of the vector for each list


class IndexCodec(Part, ABC):
    """A lossless encoding of ascending, unique indices.

    The length of a message depends only on the number of indices and the length of their range, so receivers know it.
    No indices need no bytes.
    """

    kind: ClassVar[str] = "indices"
    home: ClassVar[str] = "micro.codecs.indices"
    group: ClassVar[str] = "micro.index_codecs"

    def check_density(self, density: float) -> None:
        """Raise ValueError if another encoding is always shorter at this density."""

    @abstractmethod
    def num_bytes(self, count: int, span: int) -> int:
        """Return the bytes of ``count`` indices in [0, span)."""

    def most_bytes(self, count: int, span: int) -> int:
        """Return the most bytes that a list of up to ``count`` indices takes."""
        return self.num_bytes(count, span)

    @abstractmethod
    def encode(self, indices: Tensor, span: int) -> Tensor:
        """Return ascending, unique ``indices`` (count,) int32 in [0, span) as a message (num_bytes,) uint8."""

    @abstractmethod
    def decode(self, wire: Tensor, count: int, span: int) -> Tensor:
        """Return the (count,) int32 indices of a message of ``encode``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int32(IndexCodec):
    """Send indices as int32: four bytes each, whatever their range."""

    name: ClassVar[str] = "int32"

    def num_bytes(self, count: int, span: int) -> int:
        """Return four bytes for each index."""
        return 4 * count

    def encode(self, indices: Tensor, span: int) -> Tensor:
        """Return the indices, viewed as bytes."""
        return to_bytes(indices)

    def decode(self, wire: Tensor, count: int, span: int) -> Tensor:
        """Return the indices themselves."""
        return from_bytes(wire, torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bitmap(IndexCodec):
    """One bit for every element of the range: shorter than int32 if more than one in 32 is chosen."""

    name: ClassVar[str] = "bitmap"

    def check_density(self, density: float) -> None:
        """Raise ValueError if int32 indices, or sending all values, are shorter."""
        if density < 1 / 32:
            raise ValueError(f"indices bitmap pays from density 1/32 on, got {density:g}: use indices shortest")
        if density > 31 / 32:
            raise ValueError(f"indices bitmap pays up to density 31/32, got {density:g}: dense sends less")

    def num_bytes(self, count: int, span: int) -> int:
        """Return the bytes of one bit for each of ``span`` elements."""
        return num_packed_bytes(span, 1) if count else 0

    def encode(self, indices: Tensor, span: int) -> Tensor:
        """Return the bitmap of the indices."""
        return put_places(indices, 0, 0, span if indices.numel() else 0)

    def decode(self, wire: Tensor, count: int, span: int) -> Tensor:
        """Return the positions of the set bits."""
        return get_places(wire, count, 0, 0, span if count else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed(IndexCodec):
    """Elias-Fano code: packed low bits, then the high parts in a bitmap, where the i-th index sets bit high + i.

    At density p an index takes about log2(1 / p) + 2 bits, at most half a bit more than the optimum for random indices.

    Source: Elias, Journal of the ACM 1974; Fano, MIT Memorandum 61, 1971.
    """

    name: ClassVar[str] = "packed"

    def num_bytes(self, count: int, span: int) -> int:
        """Return the bytes of low parts and high parts."""
        low, length = _low_bits_and_bitmap(count, span)
        return num_packed_bytes(count, low) + num_packed_bytes(length, 1)

    def most_bytes(self, count: int, span: int) -> int:
        """Return one byte more: fewer indices have longer low parts, whose last byte may be partly empty."""
        return self.num_bytes(count, span) + 1

    def encode(self, indices: Tensor, span: int) -> Tensor:
        """Return low parts, then high parts."""
        low, length = _low_bits_and_bitmap(indices.numel(), span)
        return put_places(indices, low, 1, length)

    def decode(self, wire: Tensor, count: int, span: int) -> Tensor:
        """Return the indices put together again."""
        low, length = _low_bits_and_bitmap(count, span)
        return get_places(wire, count, low, 1, length)


def _low_bits_and_bitmap(count: int, span: int) -> tuple[int, int]:
    """Return the number of low bits of the shortest code, floor(log2(span / count)), and the bitmap's length."""
    if not count:
        return 0, 0
    low = max((span // count).bit_length() - 1, 0)
    return low, count + ((span - 1) >> low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortest(IndexCodec):
    """The shortest encoding for this number of indices and range; all ranks know both, so the choice is not sent."""

    name: ClassVar[str] = "shortest"

    def num_bytes(self, count: int, span: int) -> int:
        """Return the bytes of the shortest encoding."""
        return _shortest(count, span).num_bytes(count, span)

    def most_bytes(self, count: int, span: int) -> int:
        """Return the smallest ``most_bytes`` of all encodings."""
        return min(form.most_bytes(count, span) for form in _FORMS)

    def encode(self, indices: Tensor, span: int) -> Tensor:
        """Return the indices in the shortest encoding."""
        return _shortest(indices.numel(), span).encode(indices, span)

    def decode(self, wire: Tensor, count: int, span: int) -> Tensor:
        """Return the indices from the shortest encoding."""
        return _shortest(count, span).decode(wire, count, span)


_FORMS = (Packed(), Bitmap(), Int32())


def _shortest(count: int, span: int) -> IndexCodec:
    return min(_FORMS, key=lambda form: form.num_bytes(count, span))
