"""Reused threshold: the k largest of this rank, found from what the k-th magnitude was before."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.comm import Comm
from micro.parts import Rule, check_rule
from micro.selectors.base import Selector
from micro.sparse import Selection, Step

DEFAULT_PERIOD = 32  # steps, as in public code

SLACK = 0.95  # candidates begin this far below the last k-th magnitude: room for it to fall by the next step
SMALLEST = 2.0**-149  # the smallest positive float32: zeros are never chosen


@dataclass(slots=True)
class ReusedState:
    """The threshold that the next step begins with, in units of the accumulator; None where it must be found anew."""

    threshold: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused(Selector[ReusedState]):
    """Select this rank's k largest magnitudes by a threshold that the steps before have left behind.

    Magnitudes move slowly from step to step, so that a scan by the last threshold takes the place of a search. Ranks
    choose by themselves and each has a threshold of its own.

    Args:
        rule: 'repaired', what passes 0.95 of the last k-th magnitude is cut to the k largest (ties go to the lowest
            index); only where fewer than k pass the whole vector is searched again. So min(k, non-zero) are chosen,
            and no zeros. 'published', the authors' public code: the exact k-th magnitude every ``reevaluate`` steps, in
            between a hand-tuned controller of the count.
        reevaluate: tau', steps from one exact search of 'published' to the next; 'repaired' has no use for it, since it
            learns the k-th magnitude at every step.

    Source: Li and Hoefler, Ok-Topk, PPoPP 2022, arXiv 2201.07598 (selection), and its public code for VGG-16.
    Differences of 'repaired': never more than k, which the paper's volume counts on, and no controller. 'published' has
    the constants of that code (its versions for other models have others), strict comparison (a search yields k - 1),
    and at most five factors of 1.03 before a step that would send more than 4k/3; a k-th magnitude of zero makes it
    send all that is not zero until the next search. Not its 512 dense steps at the start. A state that is new between
    two searches searches at once.

    Raises:
        ValueError: no such rule, ``reevaluate`` less than 1, or given to 'repaired'.
    """

    rule: Rule = "repaired"
    reevaluate: int = DEFAULT_PERIOD
    name: ClassVar[str] = "reused"

    def __post_init__(self) -> None:
        check_rule(self)
        if self.reevaluate < 1:
            raise ValueError(f"reevaluate of {self.name} must be at least 1, got {self.reevaluate}")
        if self.rule == "repaired" and self.reevaluate != DEFAULT_PERIOD:
            raise ValueError(f"reevaluate of {self.name} is for rule=published; repaired is exact at every step")

    def start(self) -> ReusedState:
        """Return the state before the first step."""
        return ReusedState()

    def select(self, state: ReusedState, acc: Tensor, step: Step, comm: Comm) -> Selection:
        """Return what this rank's threshold lets through."""
        if self.rule == "repaired":
            return _k_largest(state, acc, step.target_count)
        anew = state.threshold is None or step.index % self.reevaluate == 0
        return _controlled(state, acc, step.target_count, anew=anew)


def _k_largest(state: ReusedState, acc: Tensor, k: int) -> Selection:
    """Return the k largest, or all that is not zero where that is less, and remember where the smallest of them is."""
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
    """Return indices and magnitudes among which the k largest are; none is zero."""
    if state.threshold is not None:
        indices, magnitudes = kernels.above_with_magnitudes(acc, max(state.threshold, SMALLEST))
        if indices.numel() >= k:
            return indices, magnitudes
    indices = kernels.largest(acc, k)
    magnitudes = acc.index_select(0, indices).abs()
    there = magnitudes >= SMALLEST
    return indices[there], magnitudes[there]


def _controlled(state: ReusedState, acc: Tensor, k: int, *, anew: bool) -> Selection:
    """Return what lies strictly above the published code's threshold, and steer that by how many there are."""
    threshold = _kth_magnitude(acc, k) if anew else state.threshold
    assert threshold is not None
    indices, magnitudes = kernels.above_with_magnitudes(acc, threshold)
    if not anew:
        threshold = _raised(magnitudes, threshold, k)
    indices = indices[magnitudes > threshold]
    state.threshold = threshold * _factor(indices.numel() / k)
    return Selection(indices, threshold=threshold)


def _kth_magnitude(acc: Tensor, k: int) -> float:
    return float(acc.index_select(0, kernels.largest(acc, k)).abs().min())  # host sync: once in tau' steps


def _raised(magnitudes: Tensor, threshold: float, k: int) -> float:
    """Raise the threshold by 3 % up to five times, while more than 4k/3 of the candidates pass."""
    for _ in range(5):
        if int(torch.count_nonzero(magnitudes > threshold)) <= 4 * k // 3:  # host sync: as the source decides
            break
        threshold *= 1.03
    return threshold


def _factor(share: float) -> float:
    if share < 2 / 3:
        return 1 / 1.012
    return 1.012 if share > 5 / 4 else 1.0
