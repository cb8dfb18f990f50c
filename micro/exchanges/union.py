"""Union: all ranks learn all chosen indices, then average their values at every one of them."""

from typing import ClassVar

import torch
from torch import Tensor

from micro.codecs import Codec
from micro.comm import Comm
from micro.exchanges.base import Exchange, gather_counts, mean_of
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, union


class Union(Exchange):
    """Gather the indices of all ranks, then all-reduce the values of every rank at their union.

    Each rank gives its value at every index that anybody chose, so an index in the update is complete: the mean of all
    accumulators there. Bytes sent per rank: 4 (n-1) k_r for the indices (none where all ranks hold the same), and
    2 w (K+1) (n-1)/n for values of w bytes, K distinct indices and the health flag.

    Source: the exchange of Yoon and Oh's public code, HiPC 2023, arXiv 2310.00967. Differences: int32 indices, lists
    sent unpadded.
    """

    name: ClassVar[str] = "union"
    accepts: ClassVar[frozenset[Overlap]] = frozenset(Overlap)

    def exchange(
        self, acc: Tensor, selection: Selection, overlap: Overlap, codec: Codec, comm: Comm, *, healthy: bool
    ) -> Exchanged:
        """Return the mean of all ranks at the union of what they chose."""
        counts = gather_counts(selection, comm)
        indices = _common_indices(selection.indices, counts, overlap, comm)
        mean, sent, healthy = mean_of(acc.index_select(0, indices), codec, comm, healthy=healthy)
        return Exchanged(
            update=(SparseValues(indices, mean),),
            sent=SparseValues(indices, sent),
            counts=counts,
            num_updated=indices.numel(),
            healthy=healthy,
        )


def _common_indices(mine: Tensor, counts: tuple[int, ...], overlap: Overlap, comm: Comm) -> Tensor:
    if overlap is Overlap.SAME or comm.world_size == 1:
        return mine
    lists = comm.gather_lists(mine, counts, "indices")
    return torch.cat(lists) if overlap is Overlap.DISJOINT else union(lists)
