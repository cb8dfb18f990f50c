"""Accordion as in public code: the norms of rank 0's mini-batch serve all ranks."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro.comm import Comm
from micro.density.accordion import Accordion
from micro.requests import Broadcast, Reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedAccordion(Accordion):
    """Send more of a layer in critical regimes, found by the norms of rank 0's mini-batch, which it broadcasts.

    Args:
        density, high, interval, change, decays: see `Accordion`.

    Source: Agarwal et al., Accordion, MLSys 2021, arXiv 2010.16248; public code of Yoon and Oh. Differences: the norm
    is of one step, not of gradients accumulated over an epoch.
    """

    name: ClassVar[str] = "accordion"
    rule: ClassVar[str] = "published"
    is_default: ClassVar[bool] = False

    def shared(self, energy: Tensor, comm: Comm) -> Reduction[Tensor]:
        """Return rank 0's energy."""
        first: Tensor = yield Broadcast(mine=energy, source=0, kind="counts")
        return first
