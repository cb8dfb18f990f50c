"""Reused threshold: this rank's k largest magnitudes, found from the k-th magnitude of the step before."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro import kernels
from micro.selectors.estimated import Fit
from micro.sparse import Selection, Step

SLACK = 0.95  # candidates begin this far below the last k-th magnitude: room for it to fall by the next step
SMALLEST = 2.0**-149  # the smallest positive float32: zeros are never chosen


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

    def start(self) -> ReusedState:
        """Return the state before the first step."""
        return ReusedState()

    def select(self, state: ReusedState, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return the k largest, or all that are not zero where there are fewer, and remember the smallest of them."""
        indices, magnitudes = _candidates(state, acc, k)
        if indices.numel() > k:
            kept = kernels.largest(magnitudes, k)
            indices, magnitudes = indices.index_select(0, kept), magnitudes.index_select(0, kept)
        if not indices.numel():
            state.threshold = None
            return Selection(indices)
        threshold = float(magnitudes.min())  # host sync: the next scan's threshold
        state.threshold = SLACK * threshold
        return Selection(indices, threshold=threshold)


def _candidates(state: ReusedState, acc: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return indices and magnitudes that hold the k largest; none is zero."""
    if state.threshold is not None:
        indices, magnitudes = kernels.above_with_magnitudes(acc, max(state.threshold, SMALLEST))
        if indices.numel() >= k:
            return indices, magnitudes
    indices = kernels.largest(acc, k)
    magnitudes = acc.index_select(0, indices).abs()
    is_positive = magnitudes >= SMALLEST
    return indices[is_positive], magnitudes[is_positive]
