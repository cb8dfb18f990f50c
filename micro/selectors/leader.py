"""The selector leader (CLT-k): one rank selects its top-k for all ranks, in turn."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.predicted_traffic import Choosing
from micro.selectors import scans
from micro.selectors.base import NoState, Selector
from micro.values.sparse import Overlap, Selection, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader(Selector[NoState]):
    """Select the k largest magnitudes of one rank, the leader, for all; rank step % world_size leads.

    No build-up and exactly k, but the others wait while the leader selects.

    Source: Chen et al., ScaleCom, NeurIPS 2020, arXiv 2104.11125 (CLT-k). Differences: plain error feedback instead of
    ScaleCom's low-pass filter; only the leader selects (public code of the MiCRO authors runs top-k on every rank and
    uses one result).
    """

    name: ClassVar[str] = "leader"
    sends: ClassVar[Choosing] = Choosing(knows_counts=True)
    overlap: ClassVar[Overlap] = Overlap.LEADER

    def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return the k largest on the leader, nothing on the others."""
        leader = step.index % comm.world_size
        k = min(step.target_count, acc.numel())
        indices = yield from scans.largest(acc, k if comm.rank == leader else 0)
        return Selection(indices, counts=tuple(k if rank == leader else 0 for rank in range(comm.world_size)))
