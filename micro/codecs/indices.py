"""The forms in which indices travel."""

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
    """A lossless form of ascending, unique indices on the wire.

    What is sent has as many bytes as the number of indices and the length of their range say, so receivers need no
    further message. No indices take no bytes.
    """

    kind: ClassVar[str] = "indices"
    home: ClassVar[str] = "micro.codecs.indices"
    group: ClassVar[str] = "micro.index_codecs"

    def check_density(self, density: float) -> None:
        """Raise ValueError where another form is shorter at this density whatever the indices are."""

    @abstractmethod
    def num_bytes(self, count: int, span: int) -> int:
        """Return the bytes that ``count`` indices in [0, span) take."""

    def most_bytes(self, count: int, span: int) -> int:
        """Return the bytes that no list of ``count`` indices or fewer exceeds."""
        return self.num_bytes(count, span)

    @abstractmethod
    def encode(self, indices: Tensor, span: int) -> Tensor:
        """Return ascending, unique ``indices`` (count,) int32 in [0, span) as they travel: (num_bytes,) uint8."""

    @abstractmethod
    def decode(self, wire: Tensor, count: int, span: int) -> Tensor:
        """Return the (count,) int32 indices that ``encode`` was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int32(IndexCodec):
    """Indices travel as int32: four bytes each, however short their range is."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bitmap(IndexCodec):
    """One bit for every place of the range: shorter than int32 where more than one in 32 is chosen."""

    name: ClassVar[str] = "bitmap"

    def check_density(self, density: float) -> None:
        """Raise ValueError where int32 indices are shorter, or where sending everything is."""
        if density < 1 / 32:
            raise ValueError(f"indices bitmap pays from density 1/32 on, got {density:g}: use indices shortest")
        if density > 31 / 32:
            raise ValueError(f"indices bitmap pays up to density 31/32, got {density:g}: dense sends less")

    def num_bytes(self, count: int, span: int) -> int:
        """Return a bit for each of ``span`` places."""
        return num_packed_bytes(span, 1) if count else 0

    def encode(self, indices: Tensor, span: int) -> Tensor:
        """Return the bits, set where an index is."""
        return put_places(indices, 0, 0, span if indices.numel() else 0)

    def decode(self, wire: Tensor, count: int, span: int) -> Tensor:
        """Return where the bits are set."""
        return get_places(wire, count, 0, 0, span if count else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed(IndexCodec):
    """Elias and Fano's code: low bits side by side, then high parts as gaps in a bitmap: the i-th sets bit high + i.

    With density p in the range an index takes about log2(1 / p) + 2 bits, within half a bit of what any code needs for
    indices at random, and the length depends only on the count.

    Source: Elias, Journal of the ACM 1974; Fano, MIT Memorandum 61, 1971.
    """

    name: ClassVar[str] = "packed"

    def num_bytes(self, count: int, span: int) -> int:
        """Return the bytes of low parts and high parts."""
        low, length = _split(count, span)
        return num_packed_bytes(count, low) + num_packed_bytes(length, 1)

    def most_bytes(self, count: int, span: int) -> int:
        """Return one byte more: fewer indices have longer low parts, of which the last byte may be half empty."""
        return self.num_bytes(count, span) + 1

    def encode(self, indices: Tensor, span: int) -> Tensor:
        """Return low parts, then high parts."""
        low, length = _split(indices.numel(), span)
        return put_places(indices, low, 1, length)

    def decode(self, wire: Tensor, count: int, span: int) -> Tensor:
        """Return the indices put together again."""
        low, length = _split(count, span)
        return get_places(wire, count, low, 1, length)


def _split(count: int, span: int) -> tuple[int, int]:
    """Return the low bits, floor(log2(span / count)), which make the code shortest, and the length of the bitmap."""
    if not count:
        return 0, 0
    low = max((span // count).bit_length() - 1, 0)
    return low, count + ((span - 1) >> low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortest(IndexCodec):
    """Whichever form is shortest for this number of indices in this range, which all ranks know: it is not sent."""

    name: ClassVar[str] = "shortest"

    def num_bytes(self, count: int, span: int) -> int:
        """Return the bytes of the shortest form."""
        return _shortest(count, span).num_bytes(count, span)

    def most_bytes(self, count: int, span: int) -> int:
        """Return the bytes of the form whose longest list is the shortest."""
        return min(form.most_bytes(count, span) for form in _FORMS)

    def encode(self, indices: Tensor, span: int) -> Tensor:
        """Return the indices in the shortest form."""
        return _shortest(indices.numel(), span).encode(indices, span)

    def decode(self, wire: Tensor, count: int, span: int) -> Tensor:
        """Return the indices from the shortest form."""
        return _shortest(count, span).decode(wire, count, span)


_FORMS = (Packed(), Bitmap(), Int32())


def _shortest(count: int, span: int) -> IndexCodec:
    return min(_FORMS, key=lambda form: form.num_bytes(count, span))
