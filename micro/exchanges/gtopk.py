"""gTop-k: merge the ranks' lists two by two in a tree, keep k of every merged list, and share the last one."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.codecs.base import from_bytes, to_bytes
from micro.comm import Comm, Kind
from micro.exchanges.base import Exchange, NoState, Wire
from micro.exchanges.gather import gather_header
from micro.index_codecs import IndexCodec, Int32
from micro.parts import Rule, check_rule
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, Step, summed


@dataclass(frozen=True, slots=True, kw_only=True)
class GTopK(Exchange[NoState]):
    """Merge lists of k entries two by two in a tree, prune every merged list to k, broadcast the last one.

    The update has k entries however many ranks there are: no build-up. They are nearly the k largest of the sum: what
    one merge prunes may have been large elsewhere. Any number of ranks will do: one without a partner waits for the
    next round. Ties go to the lowest index. Where ranks choose fewer than k, lists are as long as they come.

    Bytes sent, with int32 indices and values of w bytes: (4 + w) k by every rank but the first on the way up the tree,
    (4 + w) k (n-1)/n for the broadcast, and 8 (n-1) for counts and the health flag. Where a rank chose fewer than k,
    4 more ahead of each list.

    Args:
        rule: 'repaired', a rank keeps in its residual what it prunes from a merged list, whosever it was, so that
            nothing is lost; 'published', every rank takes back what of its own choice is not in the update, as in the
            public code. A value pruned in one part of the tree is then lost where its index comes in from another.

    Source: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth
    Networks, ICDCS 2019, arXiv 1901.04359, and its public code. Differences: any number of ranks (the code fails
    unless it is a power of two); entries of 4 + w bytes. 'published' sends an index and a value as two float64, as
    happens in the code when int64 indices and float32 values are joined.

    Raises:
        ValueError: no such rule; a codec for values; with 'published', any form of indices but the usual.
    """

    rule: Rule = "repaired"
    name: ClassVar[str] = "gtopk"
    accepts: ClassVar[frozenset[Overlap]] = frozenset({Overlap.ANY})
    encodes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_rule(self)

    def check_wire(self, wire: Wire) -> None:
        """Raise ValueError where values or indices cannot travel in this form."""
        Exchange.check_wire(self, wire)
        if self.rule == "published" and not isinstance(wire.indices, Int32):
            raise ValueError(f"rule published of gtopk sends indices as float64, got indices {wire.indices.name}")

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
        healthy: bool,
    ) -> Exchanged:
        """Return the list that the tree ends with, divided by the number of ranks."""
        counts, healthy = gather_header(selection.indices, comm, healthy=healthy)
        k = min(step.target_count, acc.numel())
        mine = SparseValues(selection.indices, acc.index_select(0, selection.indices))
        length = k if min(counts) >= k else None
        if self.rule == "published":
            tree = _Tree(comm, _AsFloat64(), torch.float64, acc.numel(), length)
        else:
            tree = _Tree(comm, wire.indices, acc.dtype, acc.numel(), length)
        last, pruned = _merge(mine, k, tree)
        total = tree.share(last)
        return Exchanged(
            update=(SparseValues(total.indices, total.values / comm.world_size),),
            sent=_among(mine, total.indices) if self.rule == "published" else summed([mine, *pruned]),
            counts=counts,
            num_updated=total.indices.numel(),
            healthy=healthy,
        )


@dataclass(frozen=True, slots=True)
class _Tree:
    """The way of lists between ranks.

    Attributes:
        codec, dtype: the forms of indices and values on the way.
        numel: of the whole vector.
        length: of every list, where all ranks can tell it beforehand.
    """

    comm: Comm
    codec: IndexCodec
    dtype: torch.dtype
    numel: int
    length: int | None

    def pass_on(self, held: SparseValues, target: int | None, source: int | None) -> SparseValues:
        """Send ``held`` to rank ``target`` and return what rank ``source`` sent; None stands for nobody."""
        length = self.length
        if length is None:
            asked = self._move(_count(held), target, source, 1, "counts")
            length = int(asked.sum())  # host sync: list lengths shape the next message
        count = length if source is not None else 0
        size = self.codec.num_bytes(count, self.numel)
        indices = self._move(self.codec.encode(held.indices, self.numel), target, source, size, "indices")
        values = self._move(held.values.to(self.dtype), target, source, count, "values")
        return SparseValues(self.codec.decode(indices, count, self.numel), values.to(held.values.dtype))

    def share(self, held: SparseValues) -> SparseValues:
        """Return what the first rank holds, on all ranks."""
        count, first = self.length, self.comm.rank == 0
        if count is None:
            count = int(self.comm.broadcast_(_count(held), 0, "counts"))  # host sync: the length of the next message
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


def _merge(mine: SparseValues, k: int, tree: _Tree) -> tuple[SparseValues, list[SparseValues]]:
    """Return what this rank holds in the end, and what it pruned on the way, with the sign turned.

    In the rounds 1, 2, 4 and so on, the ranks that are multiples of the round are left; every second of them sends its
    list to the one before.
    """
    rank, n, away = tree.comm.rank, tree.comm.world_size, 1
    held, rest = _prune(mine, k)
    pruned = [rest]
    while away < n:
        target = rank - away if rank % (2 * away) == away else None
        source = rank + away if rank % (2 * away) == 0 and rank + away < n else None
        came = tree.pass_on(held, target, source)
        if source is not None:
            held, rest = _prune(summed([held, came]), k)
            pruned.append(rest)
        away *= 2
    return held, [part for part in pruned if part.indices.numel()]


def _prune(entries: SparseValues, k: int) -> tuple[SparseValues, SparseValues]:
    """Return the k largest entries, and the others with the sign turned."""
    keep = torch.zeros_like(entries.indices, dtype=torch.bool)
    keep[kernels.largest(entries.values, k).long()] = True
    kept = SparseValues(entries.indices[keep], entries.values[keep])
    return kept, SparseValues(entries.indices[~keep], -entries.values[~keep])


def _among(entries: SparseValues, indices: Tensor) -> SparseValues:
    """Return those entries whose index is in ``indices``."""
    keep = torch.isin(entries.indices, indices)
    return SparseValues(entries.indices[keep], entries.values[keep])


def _count(entries: SparseValues) -> Tensor:
    return torch.tensor([entries.indices.numel()], dtype=torch.int32, device=entries.indices.device)


class _AsFloat64(IndexCodec):
    """Indices travel as float64: eight bytes each."""

    def num_bytes(self, count: int, span: int) -> int:
        return 8 * count

    def encode(self, indices: Tensor, span: int) -> Tensor:
        return to_bytes(indices.double())

    def decode(self, wire: Tensor, count: int, span: int) -> Tensor:
        return from_bytes(wire, torch.float64).to(torch.int32)
