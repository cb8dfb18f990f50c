"""The exchange gtopk (gTop-k): merges the ranks' lists in a binary tree, keeps k of each merged list."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from micro import kernels
from micro.codecs.base import from_bytes, to_bytes
from micro.codecs.indices import IndexCodec
from micro.comm.ranks import Comm, Kind
from micro.comm.requests import AllToAll, Broadcast, Reduction
from micro.exchanges.base import Exchange, Needs, NoState, Transport, Wire
from micro.exchanges.predicted_traffic import Choice
from micro.kernels.reference import places_of
from micro.parts import Rule, check_rule
from micro.predicted_traffic import COUNT_BYTES, Calls
from micro.values.finite import Finite, flag_of, on_device, soonest
from micro.values.sparse import Exchanged, Overlap, Selection, SparseValues, summed


@dataclass(frozen=True, slots=True, kw_only=True)
class GTopK(Exchange[NoState]):
    """Merge lists of k entries in a binary tree, prune each merged list to k, broadcast the last one.

    The update has k entries with any number of ranks: no build-up. They are approximately the k largest of the sum,
    since an entry that one merge prunes may be large on other ranks. A rank adds the entries that it prunes to its
    residual, whichever rank chose them, so nothing is lost. Any number of ranks works: one without a partner waits for
    the next round. Ties go to the lowest index. A round is one message with counts and finite flags, and room for k
    entries even if ranks choose fewer.

    Bytes sent, with int32 indices and values of w bytes: (4 + w) k by every rank but the first in the tree, (4 + w) k
    (n-1)/n for the broadcast; per message, 4 bytes for each rank whose choice is in the list, and 4 more.

    Args:
        rule: 'repaired', or 'published' as in the public code: a rank keeps its chosen entries whose indices are not in
            the update, so a value pruned in one part of the tree is lost if its index arrives from another. There an
            index and a value are sent as two float64 (from joining int64 indices and float32 values): 16 bytes in place
            of 4 + w.

    Source: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth
    Networks, ICDCS 2019, arXiv 1901.04359, and its public code. Differences: any number of ranks (the code fails unless
    it is a power of two).

    Raises:
        ValueError: no such rule; with rule 'published' another index codec than int32, when a reducer is composed.
    """

    rule: Rule = "repaired"
    name: ClassVar[str] = "gtopk"
    accepts: ClassVar[frozenset[Overlap]] = frozenset({Overlap.ANY})

    def __post_init__(self) -> None:
        check_rule(self)

    @property
    def needs(self) -> Needs:  # type: ignore[override]  # depends on the rule
        """Unencoded values; as published, indices are sent as float64."""
        return Needs.RAW_VALUES | (Needs.NO_MOMENTUM if self.rule == "repaired" else Needs.INT32_INDICES)

    def exchange(self, state: NoState, acc: Tensor, selection: Selection, transport: Transport) -> Reduction[Exchanged]:
        """Return the last list of the tree, divided by the number of ranks."""
        comm, counts, k = transport.comm, selection.counts, min(transport.step.target_count, acc.numel())
        mine = SparseValues(selection.indices, acc.index_select(0, selection.indices))
        codec, dtype = self._form(transport.wire, acc.dtype)
        form = _Form(codec, dtype, acc.numel(), k, are_full=counts is not None and min(counts) >= k)
        total, marks, pruned = yield from _merged(mine, _mark(mine.indices, transport.step.is_finite), form, comm)
        if self.rule == "published":
            sent = mine.where(torch.isin(mine.indices, total.indices))
        else:
            sent = summed([mine, *(part for part in pruned if part.indices.numel())])
        if counts is None:
            counts = tuple(torch.maximum(marks, ~marks).tolist())  # host sync: counts for the statistics
        return Exchanged(
            update=(SparseValues(total.indices, total.values / comm.world_size),),
            sent=sent,
            counts=counts,
            num_updated=total.indices.numel(),
            is_finite=soonest((marks >= 0).all()),
        )

    def _form(self, wire: Wire, dtype: torch.dtype) -> tuple[IndexCodec, torch.dtype]:
        """Return the index codec and the values' dtype in the tree; ``dtype`` is the accumulator's."""
        return (wire.indices, dtype) if self.rule == "repaired" else (_AsFloat64(), torch.float64)

    def volume(self, choice: Choice) -> tuple[Calls, float]:
        """Return the rounds of the tree, for a rank that sends in each, and the broadcast; see Exchange."""
        n, length = choice.world_size, min(choice.k, choice.numel)
        codec, dtype = self._form(choice.wire, choice.dtype)
        pairs = codec.num_bytes(length, choice.numel) + dtype.itemsize * length
        distances = [1 << place for place in range((n - 1).bit_length())]
        up: Calls = tuple(("scatter", COUNT_BYTES * (1 + min(far, n - far)) + pairs) for far in distances)
        return (*up, ("broadcast", COUNT_BYTES * (1 + n) + pairs)), choice.kept


def _mark(indices: Tensor, is_finite: Finite) -> Tensor:
    """Return a rank's count of ``indices`` (1,) int32, with all bits inverted if its gradient was not finite."""
    count = on_device([indices.numel()], torch.int32, indices.device)
    return count ^ (flag_of(is_finite, torch.int32, indices.device) - 1)


class _Form(NamedTuple):
    """The format of a message: the number of entries, the marks of the ranks that they came from, then the entries.

    Attributes:
        codec, dtype: of indices and values in the message.
        numel: of the whole vector.
        most: capacity in entries.
        are_full: whether every rank has chosen ``most`` entries, so that all lengths are known.
    """

    codec: IndexCodec
    dtype: torch.dtype
    numel: int
    most: int
    are_full: bool

    def sizes(self, num_marks: int) -> list[int]:
        """Return the bytes of the header, the indices and the values."""
        return [4 * (1 + num_marks), self.codec.most_bytes(self.most, self.numel), self.dtype.itemsize * self.most]

    def packed(self, entries: SparseValues, marks: Tensor) -> Tensor:
        """Return the message."""
        count = on_device([entries.indices.numel()], torch.int32, marks.device)
        indices, values = self.codec.encode(entries.indices, self.numel), to_bytes(entries.values.to(self.dtype))
        sizes = self.sizes(marks.numel())
        message = values.new_zeros(sum(sizes))
        for place, part in zip(
            message.split(sizes), (to_bytes(torch.cat([count, marks])), indices, values), strict=True
        ):
            place[: part.numel()] = part
        return message

    def unpacked(self, message: Tensor, num_marks: int, dtype: torch.dtype) -> tuple[SparseValues, Tensor]:
        """Return the entries, with values of ``dtype``, and the marks."""
        ahead, places, values = message.split(self.sizes(num_marks))
        numbers = from_bytes(ahead, torch.int32)
        count = self.most if self.are_full else int(numbers[0])  # host sync: the length of the list
        indices = self.codec.decode(places[: self.codec.num_bytes(count, self.numel)], count, self.numel)
        return SparseValues(indices, from_bytes(values, self.dtype)[:count].to(dtype)), numbers[1:]

    def bytes_by_kind(self, num_marks: int) -> dict[Kind, float]:
        """Return the bytes of a message that are not values."""
        ahead, indices, _ = self.sizes(num_marks)
        return {"counts": ahead, "indices": indices}


def _merged(
    mine: SparseValues, marks: Tensor, form: _Form, comm: Comm
) -> Reduction[tuple[SparseValues, Tensor, list[SparseValues]]]:
    """Return the last list of the tree, all ranks' marks, and the entries that this rank pruned, negated.

    In rounds of distance 1, 2, 4 and so on, ranks that are multiples of the distance participate; every second one
    sends its list to the previous one. Rank 0 then broadcasts the last list.
    """
    rank, n, distance, dtype = comm.rank, comm.world_size, 1, mine.values.dtype
    held, rest = _prune(mine, form.most)
    pruned = [rest]
    while distance < n:
        target = rank - distance if rank % (2 * distance) == distance else None
        source = rank + distance if rank % (2 * distance) == 0 and rank + distance < n else None
        num_marks = 0 if source is None else min(distance, n - source)
        message = marks.new_empty(0, dtype=torch.uint8) if target is None else form.packed(held, marks)
        leaving = [message.numel() if other == target else 0 for other in range(n)]
        coming = [sum(form.sizes(num_marks)) if other == source else 0 for other in range(n)]
        kinds = {} if target is None else form.bytes_by_kind(marks.numel())
        received = yield AllToAll(mine=message, sizes=leaving, received=coming, bytes_by_kind=kinds)
        if source is not None:
            entries, others = form.unpacked(received, num_marks, dtype)
            held, rest = _prune(summed([held, entries]), form.most)
            marks = torch.cat([marks, others])
            pruned.append(rest)
        distance *= 2
    if n > 1:
        message = form.packed(held, marks) if rank == 0 else marks.new_empty(sum(form.sizes(n)), dtype=torch.uint8)
        message = yield Broadcast(mine=message, source=0, bytes_by_kind=form.bytes_by_kind(n))
        held, marks = form.unpacked(message, n, dtype)
    return held, marks, pruned


def _prune(entries: SparseValues, k: int) -> tuple[SparseValues, SparseValues]:
    """Return the k largest entries, and the others negated."""
    if entries.indices.numel() <= k:
        return entries, SparseValues(entries.indices[:0], entries.values[:0])
    places = kernels.largest(entries.values, k)
    is_rest = torch.ones_like(entries.indices, dtype=torch.bool)
    is_rest[places.long()] = False
    others = entries.at(places_of(is_rest, is_rest.numel() - places.numel()))
    return entries.at(places), SparseValues(others.indices, -others.values)


class _AsFloat64(IndexCodec):
    """Send indices as float64: eight bytes each."""

    def num_bytes(self, count: int, span: int) -> int:
        return 8 * count

    def encode(self, indices: Tensor, span: int) -> Tensor:
        return to_bytes(indices.double())

    def decode(self, wire: Tensor, count: int, span: int) -> Tensor:
        return from_bytes(wire, torch.float64).to(torch.int32)
