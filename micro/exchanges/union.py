"""Union: gather all chosen indices, then average the values of all ranks at every one of them."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro import kernels
from micro.comm import Comm
from micro.exchanges.base import Exchange, NoState, Wire, gather_counts, gather_indices, mean_of
from micro.health import Finite
from micro.kernels import places
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Union(Exchange[NoState]):
    """Gather the indices of all ranks, then all-reduce the values of every rank at their union.

    Each rank gives its value at every index that any rank chose, so an index in the update is complete: the mean of all
    accumulators there. Bytes sent per rank: 4 (n-1) k_r for indices as int32 (none where all ranks hold the same, a
    broadcast where one rank chose), and 2 w (K+1) (n-1)/n for values of w bytes, K distinct indices and the finite
    flag. Encoded values are scattered and gathered instead (`mean_of`).

    Source: the exchange of Yoon and Oh's public code, HiPC 2023, arXiv 2310.00967. Differences: int32 indices, lists
    padded only where they are of about one length.
    """

    name: ClassVar[str] = "union"
    accepts: ClassVar[frozenset[Overlap]] = frozenset(Overlap)
    splits: ClassVar[bool] = True

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
        is_finite: Finite,
    ) -> Exchanged:
        """Return the mean of all ranks at the union of what they chose."""
        counts = gather_counts(selection, comm)
        indices = gather_indices(selection, counts, overlap, acc.numel(), wire.indices, comm)
        if overlap is Overlap.ANY and comm.world_size > 1:
            chosen = indices
            indices = comm.alike(lambda: kernels.distinct(chosen, acc.numel()))
        key = (step.seed, step.index, comm.rank)
        mean, sent, is_finite = mean_of(places.gather(acc, indices), wire.values, key, comm, is_finite=is_finite)
        return Exchanged(
            update=(SparseValues(indices, mean),),
            sent=SparseValues(indices, sent),
            counts=counts,
            num_updated=indices.numel(),
            is_finite=is_finite,
        )
