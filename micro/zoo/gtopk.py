"""gTop-k: merge the ranks' lists two by two in a tree, keep k of every merged list, and share the last one."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.codecs.base import from_bytes, to_bytes
from micro.codecs.indices import IndexCodec
from micro.comm import Comm
from micro.exchanges.base import Exchange, Needs, NoState, Transport, Wire
from micro.exchanges.traffic import Choice
from micro.health import Finite, flag_of, soonest
from micro.kernels.reference import places_of
from micro.on_device import on_device
from micro.parts import Rule, check_rule
from micro.requests import AllToAll, Broadcast, Reduction
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, summed
from micro.traffic import COUNT_BYTES, Calls


@dataclass(frozen=True, slots=True, kw_only=True)
class GTopK(Exchange[NoState]):
    """Merge lists of k entries two by two in a tree, prune every merged list to k, broadcast the last one.

    The update has k entries however many ranks there are: no build-up. They are nearly the k largest of the sum: what
    one merge prunes may have been large on other ranks. A rank keeps in its residual what it prunes from a merged list,
    whichever rank chose it, so that nothing is lost. Any number of ranks works: one without a partner waits for the
    next round. Ties go to the lowest index. A round is one message: counts and the finite flags are in it, and it has
    room for k entries even where ranks choose fewer.

    Bytes sent, with int32 indices and values of w bytes: (4 + w) k by every rank but the first on the way up the tree,
    (4 + w) k (n-1)/n for the broadcast; ahead of that, 4 bytes for each rank whose choice is in the list, and 4 more.

    Args:
        rule: 'repaired', or 'published': the public code, where a rank keeps of its own choice what is not in the
            update, so that a value pruned in one part of the tree is lost where its index comes in from another. An
            index and a value travel as two float64 there, as happens when int64 indices and float32 values are joined:
            16 bytes in place of 4 + w.

    Source: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth
    Networks, ICDCS 2019, arXiv 1901.04359, and its public code. Differences: any number of ranks (the code fails unless
    it is a power of two).

    Raises:
        ValueError: no such rule; with rule 'published' any form of indices but int32, when a reducer is composed.
    """

    rule: Rule = "repaired"
    name: ClassVar[str] = "gtopk"
    accepts: ClassVar[frozenset[Overlap]] = frozenset({Overlap.ANY})

    def __post_init__(self) -> None:
        check_rule(self)

    @property
    def needs(self) -> Needs:  # type: ignore[override]  # depends on the rule
        """The whole list, with values as they are; as published indices are sent as float64."""
        needs = Needs.WHOLE_VECTOR | Needs.RAW_VALUES
        return needs if self.rule == "repaired" else needs | Needs.INT32_INDICES

    def _form(self, wire: Wire, dtype: torch.dtype) -> tuple[IndexCodec, torch.dtype]:
        """Return the forms of indices and values in the tree; ``dtype`` is the accumulator's."""
        return (wire.indices, dtype) if self.rule == "repaired" else (_AsFloat64(), torch.float64)

    def _sent(self, mine: SparseValues, pruned: list[SparseValues], total: SparseValues) -> SparseValues:
        """Return what leaves this rank's residual: its choice less what it pruned; as published, what is in the update.

        Args:
            mine: what this rank chose.
            pruned: what it pruned from the lists that it merged, with negated values.
            total: the last list.
        """
        if self.rule == "published":
            return mine.where(torch.isin(mine.indices, total.indices))
        return summed([mine, *pruned])

    def exchange(self, state: NoState, acc: Tensor, selection: Selection, transport: Transport) -> Reduction[Exchanged]:
        """Return the list that the tree ends with, divided by the number of ranks."""
        comm, counts, k = transport.comm, selection.counts, min(transport.step.target_count, acc.numel())
        mine = SparseValues(selection.indices, acc.index_select(0, selection.indices))
        codec, dtype = self._form(transport.wire, acc.dtype)
        tree = Tree(comm, codec, dtype, acc.numel(), k, are_full=counts is not None and min(counts) >= k)
        last, pruned = yield from merge(Branch(mine, _mark(mine.indices, transport.step.is_finite)), tree)
        whole = yield from tree.share(last)
        total = whole.entries
        return Exchanged(
            update=(SparseValues(total.indices, total.values / comm.world_size),),
            sent=self._sent(mine, pruned, total),
            counts=counts or _counts(whole.marks),
            num_updated=total.indices.numel(),
            is_finite=soonest((whole.marks >= 0).all()),
        )

    def volume(self, choice: Choice) -> tuple[Calls, float]:
        """Return the rounds of the tree, of a rank that sends in each, and the last list to all; see Exchange."""
        n, length = choice.world_size, min(choice.k, choice.numel)
        codec, dtype = self._form(choice.wire, choice.dtype)
        pairs = codec.num_bytes(length, choice.numel) + dtype.itemsize * length
        distances = [1 << place for place in range((n - 1).bit_length())]
        up: Calls = tuple(("scatter", COUNT_BYTES * (1 + min(far, n - far)) + pairs) for far in distances)
        return (*up, ("broadcast", COUNT_BYTES * (1 + n) + pairs)), choice.kept


def _mark(indices: Tensor, is_finite: Finite) -> Tensor:
    """Return a rank's count of ``indices`` (1,) int32, with all bits turned where its gradient was not finite."""
    return on_device([indices.numel()], torch.int32, indices.device) ^ (
        flag_of(is_finite, torch.int32, indices.device) - 1
    )


def _counts(marks: Tensor) -> tuple[int, ...]:
    return tuple(torch.maximum(marks, ~marks).tolist())  # host sync: numbers of the record


@dataclass(frozen=True, slots=True)
class Branch:
    """What the lists of neighbouring ranks were merged to.

    Attributes:
        marks: int32, of each of those ranks, see `_mark`.
    """

    entries: SparseValues
    marks: Tensor


@dataclass(frozen=True, slots=True)
class Tree:
    """The messages of a tree of ranks: lists of entries go up, pair by pair, and the last one to all.

    A message has room for ``most`` entries: all that a list has where ranks choose as many. Ahead of them are their
    number and the marks of the ranks that they are from, so that nothing is sent beforehand.

    Attributes:
        codec, dtype: the forms of indices and values on the way.
        numel: of the whole vector.
        most: entries of a list.
        are_full: whether every rank has chosen as many, so that the length of every list is known.
    """

    comm: Comm
    codec: IndexCodec
    dtype: torch.dtype
    numel: int
    most: int
    are_full: bool

    def pass_on(self, held: Branch, target: int | None, source: int | None, num_marks: int) -> Reduction[Branch | None]:
        """Send ``held`` to rank ``target`` and return what rank ``source`` sent; None stands for no rank.

        Args:
            num_marks: of what comes.
        """
        message = held.entries.indices.new_empty(0, dtype=torch.uint8)
        if target is not None:
            message = self._packed(held)
        ranks, size = range(self.comm.world_size), sum(self._sizes(num_marks))
        leaving = [message.numel() if rank == target else 0 for rank in ranks]
        coming = [size if rank == source else 0 for rank in ranks]
        received = yield AllToAll(mine=message, sizes=leaving, received=coming, kind="values")
        if target is not None:
            self._count(held.marks.numel(), 1.0)
        return None if source is None else self._unpacked(received, num_marks, held)

    def share(self, held: Branch) -> Reduction[Branch]:
        """Return what the first rank holds, on all ranks."""
        n = self.comm.world_size
        if n == 1:
            return held
        message = torch.empty(sum(self._sizes(n)), dtype=torch.uint8, device=held.entries.indices.device)
        message = self._packed(held) if self.comm.rank == 0 else message
        message = yield Broadcast(mine=message, source=0, kind="values")
        self._count(n, (n - 1) / n)
        return self._unpacked(message, n, held)

    def _sizes(self, num_marks: int) -> tuple[int, int, int]:
        """Return the bytes of the numbers ahead, the indices and the values of a message."""
        return 4 * (1 + num_marks), self.codec.most_bytes(self.most, self.numel), self.dtype.itemsize * self.most

    def _count(self, num_marks: int, share: float) -> None:
        """Count the parts of a message, ``share`` of which this rank has sent as values, as what they are."""
        ahead, indices, _ = self._sizes(num_marks)
        self.comm.traffic.move(share * ahead, "values", "counts")
        self.comm.traffic.move(share * indices, "values", "indices")

    def _packed(self, held: Branch) -> Tensor:
        entries, count = held.entries, held.entries.indices.numel()
        ahead = torch.cat([on_device([count], torch.int32, entries.indices.device), held.marks])
        parts = (
            to_bytes(ahead),
            self.codec.encode(entries.indices, self.numel),
            to_bytes(entries.values.to(self.dtype)),
        )
        sizes = self._sizes(held.marks.numel())
        message = parts[0].new_zeros(sum(sizes))
        for place, part in zip(message.split(list(sizes)), parts, strict=True):
            place[: part.numel()] = part
        return message

    def _unpacked(self, message: Tensor, num_marks: int, like: Branch) -> Branch:
        ahead, places, values = message.split(list(self._sizes(num_marks)))
        numbers = from_bytes(ahead, torch.int32)
        count = self.most if self.are_full else int(numbers[0])  # host sync: the length of the list
        indices = self.codec.decode(places[: self.codec.num_bytes(count, self.numel)], count, self.numel)
        decoded = from_bytes(values, self.dtype)[:count].to(like.entries.values.dtype)
        return Branch(SparseValues(indices, decoded), numbers[1:])


def merge(mine: Branch, tree: Tree) -> Reduction[tuple[Branch, list[SparseValues]]]:
    """Return what this rank holds in the end, and what it pruned on the way, with negated values.

    In rounds of distance 1, 2, 4 and so on, the ranks that are multiples of the distance take part; every second of
    them sends its list to the one before.
    """
    rank, n, distance = tree.comm.rank, tree.comm.world_size, 1
    entries, rest = _prune(mine.entries, tree.most)
    held, pruned = Branch(entries, mine.marks), [rest]
    while distance < n:
        target = rank - distance if rank % (2 * distance) == distance else None
        source = rank + distance if rank % (2 * distance) == 0 and rank + distance < n else None
        received = yield from tree.pass_on(held, target, source, 0 if source is None else min(distance, n - source))
        if received is not None:
            both = [held.entries, received.entries]
            total = summed(both)
            entries, rest = _prune(total, tree.most)
            held = Branch(entries, torch.cat([held.marks, received.marks]))
            pruned.append(rest)
        distance *= 2
    return held, [part for part in pruned if part.indices.numel()]


def _prune(entries: SparseValues, k: int) -> tuple[SparseValues, SparseValues]:
    """Return the k largest entries, and the others with negated values."""
    if entries.indices.numel() <= k:
        return entries, SparseValues(entries.indices[:0], entries.values[:0])
    places = kernels.largest(entries.values, k)
    is_rest = torch.ones_like(entries.indices, dtype=torch.bool)
    is_rest[places.long()] = False
    rest = places_of(is_rest, is_rest.numel() - places.numel())
    kept, others = ([part.index_select(0, to) for part in (entries.indices, entries.values)] for to in (places, rest))
    return SparseValues(*kept), SparseValues(others[0], -others[1])


class _AsFloat64(IndexCodec):
    """Indices travel as float64: eight bytes each."""

    def num_bytes(self, count: int, span: int) -> int:
        return 8 * count

    def encode(self, indices: Tensor, span: int) -> Tensor:
        return to_bytes(indices.double())

    def decode(self, wire: Tensor, count: int, span: int) -> Tensor:
        return from_bytes(wire, torch.float64).to(torch.int32)
