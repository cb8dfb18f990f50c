"""Lists of entries merged in a tree of ranks, each merged list pruned to k: what the two rules of gTop-k share."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.comm import Comm, Kind
from micro.exchanges.base import Exchange, NoState, Wire, count_of, gather_header
from micro.index_codecs import IndexCodec
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, Step, summed


class TreeExchange(Exchange[NoState]):
    """Merge lists of k entries two by two in a tree, prune every merged list to k, broadcast the last one.

    A subclass says in which form entries travel, and what a rank books as sent.
    """

    accepts: ClassVar[frozenset[Overlap]] = frozenset({Overlap.ANY})
    encodes: ClassVar[bool] = False

    @abstractmethod
    def entry_form(self, wire: Wire, dtype: torch.dtype) -> tuple[IndexCodec, torch.dtype]:
        """Return the forms of indices and values in the tree; ``dtype`` is the accumulator's."""

    @abstractmethod
    def sent(self, mine: SparseValues, pruned: list[SparseValues], total: SparseValues) -> SparseValues:
        """Return what leaves this rank's residual.

        Args:
            mine: what this rank chose.
            pruned: what it pruned from the lists that it merged, with negated values.
            total: the last list.
        """

    def exchange(
        self,
        state: NoState,
        acc: Tensor,
        selection: Selection,
        *,
        step: Step,
        overlap: Overlap,
        wire: Wire,
        comm: Comm,
        is_finite: bool,
    ) -> Exchanged:
        """Return the list that the tree ends with, divided by the number of ranks."""
        header = gather_header(selection.indices, comm, is_finite=is_finite)
        k = min(step.target_count, acc.numel())
        mine = SparseValues(selection.indices, acc.index_select(0, selection.indices))
        codec, dtype = self.entry_form(wire, acc.dtype)
        tree = Tree(comm, codec, dtype, acc.numel(), k if min(header.counts) >= k else None)
        last, pruned = merge(mine, k, tree)
        total = tree.share(last)
        return Exchanged(
            update=(SparseValues(total.indices, total.values / comm.world_size),),
            sent=self.sent(mine, pruned, total),
            counts=header.counts,
            num_updated=total.indices.numel(),
            is_finite=header.is_finite,
        )


@dataclass(frozen=True, slots=True)
class Tree:
    """The messages of a tree of ranks: lists of entries go up, pair by pair, and the last one to all.

    Attributes:
        codec, dtype: the forms of indices and values on the way.
        numel: of the whole vector.
        length: of every list, where all ranks know it beforehand; else None, and it is sent ahead of each list.
    """

    comm: Comm
    codec: IndexCodec
    dtype: torch.dtype
    numel: int
    length: int | None

    def pass_on(self, held: SparseValues, target: int | None, source: int | None) -> SparseValues:
        """Send ``held`` to rank ``target`` and return what rank ``source`` sent; None stands for no rank."""
        length = self.length
        if length is None:
            lengths = self._move(count_of(held), target, source, 1, "counts")
            length = int(lengths.sum())  # host sync: list lengths shape the next message
        count = length if source is not None else 0
        size = self.codec.num_bytes(count, self.numel)
        indices = self._move(self.codec.encode(held.indices, self.numel), target, source, size, "indices")
        values = self._move(held.values.to(self.dtype), target, source, count, "values")
        return SparseValues(self.codec.decode(indices, count, self.numel), values.to(held.values.dtype))

    def share(self, held: SparseValues) -> SparseValues:
        """Return what the first rank holds, on all ranks."""
        count, first = self.length, self.comm.rank == 0
        if count is None:
            count = int(self.comm.broadcast_(count_of(held), 0, "counts"))  # host sync: the length of the next message
        if count == 0 or self.comm.world_size == 1:
            return SparseValues(held.indices[:count], held.values[:count])
        size, device = self.codec.num_bytes(count, self.numel), held.indices.device
        indices = torch.empty(size, dtype=torch.uint8, device=device)
        indices = self.codec.encode(held.indices, self.numel) if first else indices
        values = held.values.to(self.dtype) if first else torch.empty(count, dtype=self.dtype, device=device)
        self.comm.broadcast_(indices, 0, "indices")
        self.comm.broadcast_(values, 0, "values")
        return SparseValues(self.codec.decode(indices, count, self.numel), values.to(held.values.dtype))

    def _move(self, message: Tensor, target: int | None, source: int | None, size: int, kind: Kind) -> Tensor:
        ranks = range(self.comm.world_size)
        pieces = [message if rank == target else message[:0] for rank in ranks]
        sizes = [size if rank == source else 0 for rank in ranks]
        return torch.cat(self.comm.scatter_lists(pieces, sizes, kind))


def merge(mine: SparseValues, k: int, tree: Tree) -> tuple[SparseValues, list[SparseValues]]:
    """Return what this rank holds in the end, and what it pruned on the way, with negated values.

    In rounds of distance 1, 2, 4 and so on, the ranks that are multiples of the distance take part; every second of
    them sends its list to the one before.
    """
    rank, n, distance = tree.comm.rank, tree.comm.world_size, 1
    held, rest = _prune(mine, k)
    pruned = [rest]
    while distance < n:
        target = rank - distance if rank % (2 * distance) == distance else None
        source = rank + distance if rank % (2 * distance) == 0 and rank + distance < n else None
        received = tree.pass_on(held, target, source)
        if source is not None:
            held, rest = _prune(summed([held, received]), k)
            pruned.append(rest)
        distance *= 2
    return held, [part for part in pruned if part.indices.numel()]


def _prune(entries: SparseValues, k: int) -> tuple[SparseValues, SparseValues]:
    """Return the k largest entries, and the others with negated values."""
    keep = torch.zeros_like(entries.indices, dtype=torch.bool)
    keep[kernels.largest(entries.values, k).long()] = True
    return entries.where(keep), SparseValues(entries.indices[~keep], -entries.values[~keep])
