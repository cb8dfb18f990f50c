"""Union: gather all chosen indices, then average the values of all ranks at every one of them."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from micro import kernels
from micro.comm import Comm
from micro.exchanges.base import Exchange, Wire, gather_counts, gather_indices, mean_of
from micro.exchanges.lists_in_rows import LastCounts, in_rows
from micro.health import Finite
from micro.index_codecs import Int32
from micro.kernels import places
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Union(Exchange[LastCounts]):
    """Gather the indices of all ranks, then all-reduce the values of every rank at their union.

    Each rank gives its value at every index that any rank chose, so an index in the update is complete: the mean of all
    accumulators there. Bytes sent per rank: 4 (n-1) k_r for indices as int32 (none where all ranks hold the same, a
    broadcast where one rank chose), and 2 w (K+1) (n-1)/n for values of w bytes, K distinct indices and the finite
    flag. Encoded values are scattered and gathered instead (`mean_of`).

    On an accelerator, where ranks choose by a threshold, lists travel as rows of equal length with their counts, which
    have room for the longest list of the last step and some more (`LastCounts`): 8 + 4 c bytes to each other rank, c
    the room. The host then reads once, what came and how many indices differ. Where a row of any rank was too short,
    all gather the lists in their exact lengths, and the step is ``overfull``.

    Source: the exchange of Yoon and Oh's public code, HiPC 2023, arXiv 2310.00967. Differences: int32 indices, lists
    padded only where they are of about one length.
    """

    name: ClassVar[str] = "union"
    accepts: ClassVar[frozenset[Overlap]] = frozenset(Overlap)
    splits: ClassVar[bool] = True

    def start(self) -> LastCounts:
        """Return a state that knows no counts yet."""
        return LastCounts()

    def save(self, state: LastCounts) -> dict[str, Any]:
        """Return nothing: counts are learned again."""
        return {}

    def reads_late(self, state: LastCounts, acc: Tensor, step: Step, wire: Wire, comm: Comm) -> bool:
        """Return whether lists travel in rows, of a length that follows from the last step; see Exchange."""
        return acc.device.type != "cpu" and isinstance(wire.indices, Int32) and state.room(comm.world_size) is not None

    def exchange(
        self,
        state: LastCounts,
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
        chosen = indices = None
        if selection.unread is not None:
            chosen = in_rows(state, selection.unread, acc.numel(), comm, is_finite=is_finite)
            selection, indices = chosen.selection, chosen.distinct
        counts = gather_counts(selection, comm)
        state.learn(counts, acc)
        if indices is None:
            indices = _distinct(selection, counts, overlap, acc.numel(), wire, comm)
        key = (step.seed, step.index, comm.rank)
        mean, sent, is_finite = mean_of(places.gather(acc, indices), wire.values, key, comm, is_finite=is_finite)
        return Exchanged(
            update=(SparseValues(indices, mean),),
            sent=SparseValues(indices, sent),
            counts=counts,
            num_updated=indices.numel(),
            is_finite=is_finite,
            selection=None if chosen is None else chosen.selection,
        )


def _distinct(
    selection: Selection, counts: tuple[int, ...], overlap: Overlap, numel: int, wire: Wire, comm: Comm
) -> Tensor:
    """Return the indices that any rank chose, each of them once."""
    indices = gather_indices(selection, counts, overlap, numel, wire.indices, comm)
    if overlap is Overlap.ANY and comm.world_size > 1:
        return comm.alike(lambda: kernels.distinct(indices, numel))
    return indices
