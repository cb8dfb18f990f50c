"""The fit reused: the k largest magnitudes, searched above a fraction of the last step's k-th magnitude."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.parts import Rule
from micro.selectors.estimated import Fit
from micro.selectors.fits.correction import above_or_largest, largest_of
from micro.values.sparse import Selection, Step

SLACK = 0.95  # candidates start at this factor of the last k-th magnitude, as it may fall
SMALLEST = 2.0**-149  # the smallest positive float32: zeros are never selected
MAX_RAISES, RAISE = 5, 1.03  # as published: before a step that would send more than 4k/3


@dataclass(slots=True)
class ReusedState:
    """The threshold that the next step starts with; None if it must be searched."""

    threshold: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused(Fit[ReusedState]):
    """Selects the k largest magnitudes among those above 0.95 of the last step's k-th magnitude.

    Magnitudes change slowly, so one scan with the last threshold replaces a search. The k largest that pass are kept
    (ties: lowest index); only if fewer than k pass, the whole vector is searched. So min(k, non-zero) are selected, and
    no zeros.

    Source: Li and Hoefler, Ok-Topk, PPoPP 2022, arXiv 2201.07598 (selection). Differences: never more than k, as the
    paper's volume assumes, and no controller of the count.
    """

    name: ClassVar[str] = "reused"
    state: ClassVar[type[ReusedState]] = ReusedState

    def select(self, state: ReusedState, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return the k largest, or all that are not zero if there are fewer, and store the smallest."""
        indices, magnitudes = above_or_largest(acc, state.threshold, k, k)
        if indices.numel() > k:
            indices, magnitudes = largest_of(indices, magnitudes, k)
        if not indices.numel():
            state.threshold = None
            return Selection(indices)
        threshold = float(magnitudes.min())  # host sync: the next scan's threshold
        state.threshold = max(SLACK * threshold, SMALLEST)
        return Selection(indices, threshold=threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedReused(Fit[ReusedState]):
    """Selects strictly above a threshold that is searched every ``reevaluate`` steps and adjusted in between.

    Constants of the public code for VGG-16 (other models have others): strict comparison, so a search yields k - 1; at
    most five factors of 1.03 before a step that would send more than 4k/3; a factor of 1.012 up or down for the next
    step. After a k-th magnitude of zero, it sends all that is not zero until the next search.

    Args:
        reevaluate: tau', steps between exact searches, at least 1.

    Source: as `Reused`. Differences: without the code's 512 dense steps at the start; a new state between two searches
    searches at once.

    Raises:
        ValueError: ``reevaluate`` less than 1.
    """

    reevaluate: int = 32
    name: ClassVar[str] = "reused_published"
    state: ClassVar[type[ReusedState]] = ReusedState
    rule: ClassVar[Rule] = "published"

    def __post_init__(self) -> None:
        if self.reevaluate < 1:
            raise ValueError(f"reevaluate of {self.name} must be at least 1, got {self.reevaluate}")

    def select(self, state: ReusedState, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return all indices strictly above the threshold, and adjust the threshold by their count."""
        if state.threshold is None or step.index % self.reevaluate == 0:
            threshold = float(acc.index_select(0, kernels.largest(acc, k)).abs().min())  # host sync: once in tau' steps
            indices, magnitudes = kernels.above(acc, threshold)
        else:
            threshold = state.threshold
            indices, magnitudes = kernels.above(acc, threshold)
            for _ in range(MAX_RAISES):
                if int(torch.count_nonzero(magnitudes > threshold)) <= 4 * k // 3:  # host sync: as the source decides
                    break
                threshold *= RAISE
        indices = indices[magnitudes > threshold]
        share = indices.numel() / k
        state.threshold = threshold * (1 / 1.012 if share < 2 / 3 else 1.012 if share > 5 / 4 else 1.0)
        return Selection(indices, threshold=threshold)
