"""In pieces: one selection over the whole vector, sent piece by piece."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.exchanges.base import Exchange, Needs, NoState, Transport, Wire
from micro.exchanges.traffic import Choice
from micro.exchanges.union import Union
from micro.health import all_finite
from micro.partition import equal_sizes
from micro.parts import as_part
from micro.randomness import seed_for
from micro.requests import Reduction
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, joined
from micro.traffic import Call, Calls

MIB = 2**20
Pieces = list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InPieces(Exchange[NoState]):
    """Send one choice in several exchanges, one for each piece of the vector; pieces follow each other in flat order.

    What is chosen does not depend on the pieces. Neither does the update: bit for bit where values travel without loss
    and collectives add in rank order, up to rounding otherwise. A piece of which no rank chose anything is exchanged
    too. Counts that the selection knew are those of the vector, so that each piece gathers its own where the exchange
    needs them: `Union` sends 4 (n-1) bytes in one more collective, except where all ranks share the indices. The finite
    flag, and the counts of `Gather` and `DSA`, travel with every piece.

    Args:
        each: the exchange that each piece goes through: a part, its name, or a mapping.
        ends: where each piece ends in the flat vector, rising; the last is the vector's length.
        piece_mb: in place of ends: pieces differ by at most one element, and have at most this many MiB of the
            accumulator, or one element.

    Raises:
        ValueError: an exchange that needs the whole vector; ends that do not rise, or piece_mb not positive; both of
            them or neither; at a step, ends of a vector of another length.
    """

    each: Exchange[Any] = field(default_factory=Union)
    ends: tuple[int, ...] = ()
    piece_mb: float | None = None
    name: ClassVar[str] = "in_pieces"

    def __post_init__(self) -> None:
        object.__setattr__(self, "each", as_part(Exchange, self.each))
        object.__setattr__(self, "ends", tuple(self.ends))
        if Needs.WHOLE_VECTOR in self.each.needs:
            raise ValueError(
                f"exchange {self.each.label} depends on the whole vector, {self.name} does not have it: "
                "use union, or gather or dsa without their published rule"
            )
        if bool(self.ends) == (self.piece_mb is not None):
            raise ValueError(f"{self.name} needs either ends or piece_mb, got ends {self.ends}, {self.piece_mb} MiB")
        if any(stop <= start for start, stop in pairwise((0, *self.ends))):
            raise ValueError(f"ends of {self.name} must rise from above 0, got {self.ends}")
        if self.piece_mb is not None and not 0 < self.piece_mb < math.inf:
            raise ValueError(f"piece_mb of {self.name} must be positive, got {self.piece_mb}")

    @property
    def accepts(self) -> frozenset[Overlap]:  # type: ignore[override]  # depends on the exchange
        """Which relations of index sets the exchange takes."""
        return self.each.accepts

    @property
    def rule_name(self) -> str | None:
        """Which published behaviour the exchange follows."""
        return self.each.rule_name

    @property
    def full_name(self) -> str:
        """The name, and the exchange's."""
        return f"{self.name} {self.each.full_name}"

    def check_wire(self, wire: Wire) -> None:
        """Raise ValueError where values or indices cannot travel in this form."""
        self.each.check_wire(wire)

    def pieces(self, numel: int, element_size: int) -> Pieces:
        """Return (start, stop) of each piece of a vector; the same on all ranks.

        Args:
            element_size: bytes of one element.

        Raises:
            ValueError: the last end is not numel.
        """
        ends: Sequence[int] = self.ends
        if self.piece_mb is not None:
            size = max(1, int(self.piece_mb * MIB) // element_size)
            ends = list(accumulate(equal_sizes(numel, -(-numel // size))))
        if ends[-1] != numel:
            raise ValueError(f"ends of {self.name} must end at {numel}, the vector's length, got {ends[-1]}")
        return list(pairwise((0, *ends)))

    def exchange(self, state: NoState, acc: Tensor, selection: Selection, transport: Transport) -> Reduction[Exchanged]:
        """Return the mean update of all pieces."""
        pieces, step = self.pieces(acc.numel(), acc.element_size()), transport.step
        if len(pieces) == 1:
            return (yield from self.each.exchange(self.each.start(), acc, selection, transport))
        done = []
        for number, mine in enumerate(_split(selection, pieces, transport)):
            start, stop = pieces[number]
            own = replace(step, seed=seed_for(step.seed, f"piece {number}")) if number else step
            exchange = self.each.exchange(self.each.start(), acc[start:stop], mine, replace(transport, step=own))
            done.append((yield from exchange))
        starts = [start for start, _ in pieces]
        return Exchanged(  # each piece has as many parts of the update, in rank order, as any other
            update=tuple(_moved(parts, starts) for parts in zip(*(found.update for found in done), strict=True)),
            sent=_moved([found.sent for found in done], starts),
            counts=tuple(map(sum, zip(*(found.counts for found in done), strict=True))),
            num_updated=sum(found.num_updated for found in done),
            is_finite=all_finite([found.is_finite for found in done]),
        )

    def volume(self, choice: Choice) -> tuple[Calls, float]:
        """Return what all pieces send in turn; what was chosen is taken to lie evenly over them. See Exchange."""
        pieces = self.pieces(choice.numel, choice.dtype.itemsize)
        if len(pieces) == 1:
            return self.each.volume(choice)
        calls: list[Call] = []
        for start, stop in pieces:
            calls += self.each.volume(choice.part((stop - start) / choice.numel))[0]
        return tuple(calls), choice.total


def _split(selection: Selection, pieces: Pieces, transport: Transport) -> Iterator[Selection]:
    """Yield what was chosen of each piece, as indices and spans within it."""
    ends = torch.tensor([stop for _, stop in pieces], dtype=torch.int32, device=selection.indices.device)
    places = torch.searchsorted(selection.indices, ends).tolist()  # host sync: list lengths shape the messages
    for (start, stop), (first, last) in zip(pieces, pairwise((0, *places)), strict=True):
        spans = None  # of which one outside the piece has no length
        if selection.spans is not None:
            spans = tuple(
                (min(max(a, start), stop) - start, min(max(b, start), stop) - start) for a, b in selection.spans
            )
        counts = (last - first,) * transport.comm.world_size if transport.overlap is Overlap.SAME else None
        yield Selection(selection.indices[first:last] - start, counts=counts, spans=spans)


def _moved(parts: Sequence[SparseValues], starts: Sequence[int]) -> SparseValues:
    """Return the entries of all pieces, at their places in the vector."""
    return joined([SparseValues(part.indices + a, part.values) for part, a in zip(parts, starts, strict=True)])[0]
