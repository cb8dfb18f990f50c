"""Union: gather all chosen indices, then average the values of all ranks at every one of them."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro import kernels
from micro.comm import Comm
from micro.exchanges.base import Exchange, NoState, Wire, gather_counts, gather_indices, mean_of
from micro.health import Finite
from micro.kernels import places
from micro.requests import Once, Reduction
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
    ) -> Reduction[Exchanged]:
        """Return the mean of all ranks at the union of what they chose."""
        counts = yield from gather_counts(selection)
        indices = yield from _distinct(selection, counts, overlap, acc.numel(), wire, comm)
        key = (step.seed, step.index, comm.rank)
        values = places.gather(acc, indices)
        mean, sent, is_finite = yield from mean_of(values, wire.values, key, comm, is_finite=is_finite)
        return Exchanged(
            update=(SparseValues(indices, mean),),
            sent=SparseValues(indices, sent),
            counts=counts,
            num_updated=indices.numel(),
            is_finite=is_finite,
        )


def _distinct(
    selection: Selection, counts: tuple[int, ...], overlap: Overlap, numel: int, wire: Wire, comm: Comm
) -> Reduction[Tensor]:
    """Return the indices that any rank chose, each of them once."""
    indices = yield from gather_indices(selection, counts, overlap, numel, wire.indices, comm)
    if overlap is not Overlap.ANY or comm.world_size == 1:
        return indices
    distinct: Tensor = yield Once(work=lambda: kernels.distinct(indices, numel))
    return distinct
