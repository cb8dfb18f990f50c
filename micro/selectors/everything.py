"""Everything: all indices, for methods that shorten the values only."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.requests import Reduction
from micro.selectors.base import Selector, Traits
from micro.sparse import Overlap, Selection, Step
from micro.traffic import Choosing


@dataclass(slots=True)
class EverythingState:
    """The indices, which are the same at every step; not saved."""

    indices: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything(Selector[EverythingState]):
    """Select every index on every rank: quantisers send all values, in fewer bits. No index travels.

    It goes with a density of 1 at every step.
    """

    name: ClassVar[str] = "everything"
    state: ClassVar[type[EverythingState]] = EverythingState
    sends: ClassVar[Choosing] = Choosing(knows_counts=True)
    overlap: ClassVar[Overlap] = Overlap.SAME
    traits: ClassVar[Traits] = Traits.ALL_PARAMETERS

    def save(self, state: EverythingState) -> dict[str, Any]:
        """Return nothing: the indices follow from the length of the vector."""
        return {}

    def select(self, state: EverythingState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return all indices."""
        yield from ()
        if state.indices is None or state.indices.numel() != acc.numel() or state.indices.device != acc.device:
            state.indices = torch.arange(acc.numel(), dtype=torch.int32, device=acc.device)
        return Selection(state.indices, counts=(acc.numel(),) * comm.world_size)
