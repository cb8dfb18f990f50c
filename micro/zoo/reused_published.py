"""Reused threshold as in its public code: an exact search now and then, in between a controller of the count."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.parts import Rule
from micro.selectors.estimated import Fit
from micro.selectors.fits.reused import ReusedState
from micro.sparse import Selection, Step

MAX_RAISES, RAISE = 5, 1.03  # before a step that would send more than 4k/3


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedReused(Fit[ReusedState]):
    """What is strictly above a threshold that is searched every ``reevaluate`` steps and steered in between.

    It has the constants of the public code for VGG-16 (its versions for other models have others): strict comparison,
    so that a search yields k - 1; at most five factors of 1.03 before a step that would send more than 4k/3; a factor
    of 1.012 up or down for the next step. A k-th magnitude of zero makes it send all that is not zero until the next
    search.

    Args:
        reevaluate: tau', steps from one exact search to the next, at least 1.

    Source: Li and Hoefler, Ok-Topk, PPoPP 2022, arXiv 2201.07598, and its public code for VGG-16. Differences: without
    the code's 512 dense steps at the start; a state that is new between two searches searches at once.

    Raises:
        ValueError: ``reevaluate`` less than 1.
    """

    reevaluate: int = 32
    name: ClassVar[str] = "reused_published"
    rule: ClassVar[Rule] = "published"

    def __post_init__(self) -> None:
        if self.reevaluate < 1:
            raise ValueError(f"reevaluate of {self.name} must be at least 1, got {self.reevaluate}")

    def start(self) -> ReusedState:
        """Return the state before the first step."""
        return ReusedState()

    def select(self, state: ReusedState, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return what lies strictly above the threshold, and steer the threshold by the count."""
        if state.threshold is None or step.index % self.reevaluate == 0:
            threshold = _kth_magnitude(acc, k)
            indices, magnitudes = kernels.above_with_magnitudes(acc, threshold)
        else:
            indices, magnitudes = kernels.above_with_magnitudes(acc, state.threshold)
            threshold = _raised(magnitudes, state.threshold, k)
        indices = indices[magnitudes > threshold]
        state.threshold = threshold * _factor(indices.numel() / k)
        return Selection(indices, threshold=threshold)


def _kth_magnitude(acc: Tensor, k: int) -> float:
    return float(acc.index_select(0, kernels.largest(acc, k)).abs().min())  # host sync: once in tau' steps


def _raised(magnitudes: Tensor, threshold: float, k: int) -> float:
    """Return the threshold, raised by 3 % up to five times while more than 4k/3 of the candidates pass."""
    for _ in range(MAX_RAISES):
        if int(torch.count_nonzero(magnitudes > threshold)) <= 4 * k // 3:  # host sync: as the source decides
            break
        threshold *= RAISE
    return threshold


def _factor(share: float) -> float:
    """Return the factor on the threshold after a step that selected ``share`` of k."""
    if share < 2 / 3:
        return 1 / 1.012
    return 1.012 if share > 5 / 4 else 1.0
