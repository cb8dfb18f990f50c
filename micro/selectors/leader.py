"""CLT-k: the leader's top-k serves all ranks, and leaders take turns."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.comm import Comm
from micro.selectors.base import NoState, Selector, Step
from micro.sparse import Overlap, Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader(Selector[NoState]):
    """Select the k largest magnitudes of one rank, the leader, on all ranks; rank step % world_size leads.

    No build-up and exactly k, but the others wait while the leader selects.

    Source: Chen et al., ScaleCom, NeurIPS 2020, arXiv 2104.11125 (CLT-k). Differences: plain error feedback instead of
    ScaleCom's low-pass filter; only the leader selects (public code of the MiCRO authors runs top-k on every rank and
    uses one result).
    """

    name: ClassVar[str] = "leader"
    overlap: ClassVar[Overlap] = Overlap.SAME

    def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Selection:
        """Return the leader's k largest, received from it."""
        leader = step.index % comm.world_size
        k = min(step.target_count, acc.numel())
        if comm.rank == leader:
            indices = kernels.largest(acc, k)
        else:
            indices = torch.empty(k, dtype=torch.int32, device=acc.device)
        comm.broadcast_(indices, leader, "indices")
        return Selection(indices, counts=tuple(k if rank == leader else 0 for rank in range(comm.world_size)))
