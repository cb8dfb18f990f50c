"""The selector everything: all indices, for methods that only quantise values."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.predicted_traffic import Choosing
from micro.selectors.base import NoState, Selector, Traits
from micro.values.sparse import Overlap, Selection, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything(Selector[NoState]):
    """Select every index on every rank, for quantisers. No indices are sent.

    It requires density 1 at every step.
    """

    name: ClassVar[str] = "everything"
    sends: ClassVar[Choosing] = Choosing(knows_counts=True)
    overlap: ClassVar[Overlap] = Overlap.SAME
    traits: ClassVar[Traits] = Traits.ALL_PARAMETERS | Traits.EVERY_INDEX

    def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return all indices."""
        yield from ()
        indices = torch.arange(acc.numel(), dtype=torch.int32, device=acc.device)
        return Selection(indices, counts=(acc.numel(),) * comm.world_size)
