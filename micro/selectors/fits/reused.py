"""Reused threshold: this rank's k largest magnitudes, found from the k-th magnitude of the step before."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.parts import Rule
from micro.selectors.estimated import Fit
from micro.selectors.fits.correction import above_or_largest, largest_of
from micro.values.sparse import Selection, Step

SLACK = 0.95  # candidates begin this far below the last k-th magnitude: room for it to fall by the next step
SMALLEST = 2.0**-149  # the smallest positive float32: zeros are never chosen
MAX_RAISES, RAISE = 5, 1.03  # as published: before a step that would send more than 4k/3


@dataclass(slots=True)
class ReusedState:
    """The threshold that the next step begins with, in units of the accumulator; None where it must be searched."""

    threshold: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused(Fit[ReusedState]):
    """The k largest magnitudes, among what passes 0.95 of the last step's k-th magnitude.

    Magnitudes change slowly from step to step, so one scan by the last threshold replaces a search. What passes is cut
    to the k largest (ties go to the lowest index); only where fewer than k pass is the whole vector searched. So
    min(k, non-zero) are selected, and no zeros.

    Source: Li and Hoefler, Ok-Topk, PPoPP 2022, arXiv 2201.07598 (selection). Differences: never more than k, which the
    paper's volume assumes, and no controller of the count.
    """

    name: ClassVar[str] = "reused"
    state: ClassVar[type[ReusedState]] = ReusedState

    def select(self, state: ReusedState, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return the k largest, or all that are not zero where there are fewer, and remember the smallest of them."""
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
    """What is strictly above a threshold that is searched every ``reevaluate`` steps and steered in between.

    It has the constants of the public code for VGG-16 (its versions for other models have others): strict comparison,
    so that a search yields k - 1; at most five factors of 1.03 before a step that would send more than 4k/3; a factor
    of 1.012 up or down for the next step. A k-th magnitude of zero makes it send all that is not zero until the next
    search.

    Args:
        reevaluate: tau', steps from one exact search to the next, at least 1.

    Source: as `Reused`. Differences: without the code's 512 dense steps at the start; a state that is new between two
    searches searches at once.

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
        """Return what lies strictly above the threshold, and steer the threshold by the count."""
        if state.threshold is None or step.index % self.reevaluate == 0:
            threshold = float(acc.index_select(0, kernels.largest(acc, k)).abs().min())  # host sync: in tau' steps once
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
