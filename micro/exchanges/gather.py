"""Gather: every rank sends its own pairs of index and value to all others."""

from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs import Codec
from micro.comm import Comm
from micro.exchanges.base import Exchange
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, union


class Gather(Exchange):
    """Gather (index, value) pairs; an index gets the values of those ranks alone that chose it, divided by all ranks.

    Only a rank's own choice leaves its residual. Bytes sent per rank: (n-1) (4 + w) k_r with values of w bytes, and
    8 (n-1) for the count and the health flag.

    Source: the allgather scheme of sparse SGD, e.g. Shi et al., arXiv 1911.08772. Differences: int32 indices, lists
    sent unpadded, added up in rank order so that all ranks get the same bits.
    """

    name: ClassVar[str] = "gather"
    accepts: ClassVar[frozenset[Overlap]] = frozenset({Overlap.ANY, Overlap.DISJOINT})

    def exchange(
        self, acc: Tensor, selection: Selection, overlap: Overlap, codec: Codec, comm: Comm, *, healthy: bool
    ) -> Exchanged:
        """Return the sum of all ranks' pairs, divided by the number of ranks."""
        counts, healthy = _gather_header(selection.indices, comm, healthy=healthy)
        wire = codec.encode(acc.index_select(0, selection.indices))
        indices = comm.gather_lists(selection.indices, counts, "indices")
        values = comm.gather_lists(wire, counts, "values")
        parts = tuple(
            SparseValues(index, codec.decode(value, acc.dtype) / comm.world_size)
            for index, value in zip(indices, values, strict=True)
        )
        num_updated = sum(counts) if overlap is Overlap.DISJOINT else union(indices).numel()
        sent = SparseValues(selection.indices, codec.decode(wire, acc.dtype))
        return Exchanged(update=parts, sent=sent, counts=counts, num_updated=num_updated, healthy=healthy)


def _gather_header(indices: Tensor, comm: Comm, *, healthy: bool) -> tuple[tuple[int, ...], bool]:
    header = torch.tensor([indices.numel(), int(healthy)], dtype=torch.int32, device=indices.device)
    rows = comm.gather_rows(header).tolist()  # host sync: list lengths shape the next message
    return tuple(row[0] for row in rows), all(row[1] for row in rows)
