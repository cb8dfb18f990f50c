"""The selector threshold (hard threshold): a fixed threshold, without control of the density."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.predicted_traffic import Choosing
from micro.selectors import scans
from micro.selectors.base import NoState, Selector, Traits
from micro.values.sparse import Selection, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold(Selector[NoState]):
    """Select all magnitudes at or above a constant threshold, in the whole vector on every rank.

    Args:
        value: the threshold; None: 1 / (2 sqrt k), the rule of the source.

    The density is not controlled: it drifts with the scale of the gradients, and the union over ranks adds build-up.

    Source: Sahu et al., Rethinking gradient sparsification as total error minimization, NeurIPS 2021, arXiv 2108.00951.

    Raises:
        ValueError: ``value`` is not positive.
    """

    value: float | None = None
    name: ClassVar[str] = "threshold"
    sends: ClassVar[Choosing] = Choosing()
    traits: ClassVar[Traits] = Traits.OWN_DENSITY

    def __post_init__(self) -> None:
        if self.value is not None and not self.value > 0:
            raise ValueError(f"value of the threshold must be positive, got {self.value}")

    def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return all indices at or above the threshold."""
        threshold = self.value if self.value is not None else hard_threshold(step.target_count)
        indices, _ = yield from scans.above(acc, threshold)
        return Selection(indices, threshold=threshold)


def hard_threshold(k: int) -> float:
    """Return 1 / (2 sqrt k), the total-error rule's threshold for k elements per step."""
    return 1.0 / (2.0 * math.sqrt(k))
