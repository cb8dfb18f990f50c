"""Hard-threshold: a fixed cut, whatever density comes out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro import kernels
from micro.comm import Comm
from micro.selectors.asking import Asking, answered
from micro.selectors.base import Selector
from micro.selectors.unread import UNKNOWN, Listed, counted
from micro.sparse import Selection, Step

PLENTY = 2.0  # room of an accelerator's list, for each index that is wanted, and for each of the last step


@dataclass(slots=True)
class ThresholdState:
    """How many indices the last step chose; 0 before the first."""

    last_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold(Selector[ThresholdState]):
    """Select every magnitude at or above one threshold that never changes, over the whole vector on every rank.

    Args:
        value: the threshold; None takes 1 / (2 sqrt k), the rule of the source.

    The density is not controlled: it drifts with the scale of the gradients, and the union over ranks adds build-up.

    Source: Sahu et al., Rethinking gradient sparsification as total error minimization, NeurIPS 2021, arXiv 2108.00951.

    Raises:
        ValueError: ``value`` is not positive.
    """

    value: float | None = None
    name: ClassVar[str] = "threshold"
    follows_density: ClassVar[bool] = False
    reads_late: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.value is not None and not self.value > 0:
            raise ValueError(f"value of the threshold must be positive, got {self.value}")

    def start(self) -> ThresholdState:
        """Return the state before the first step."""
        return ThresholdState()

    def select(self, state: ThresholdState, acc: Tensor, step: Step, comm: Comm) -> Selection:
        """Return all indices at or above the threshold."""
        return answered(self.choosing(state, acc, step, comm), comm)

    def choosing(self, state: ThresholdState, acc: Tensor, step: Step, comm: Comm) -> Asking[Selection]:
        """Choose all indices at or above the threshold; see Selector."""
        threshold = self.value if self.value is not None else hard_threshold(step.target_count)
        if acc.device.type == "cpu":
            return _above(acc, threshold)
        room = math.ceil(PLENTY * max(step.target_count, state.last_count))
        return (yield from counted(_Above(state, acc, threshold, room), step, comm))


def _above(acc: Tensor, threshold: float) -> Selection:
    return Selection(kernels.above(acc, threshold), threshold=threshold)


class _Above(Listed):
    """What is at or above a threshold, as far as a list has ``room`` for it."""

    def __init__(self, state: ThresholdState, acc: Tensor, threshold: float, room: int) -> None:
        self.state, self.acc, self.threshold = state, acc, threshold
        self.found = kernels.above_unread(acc, threshold, room)

    @property
    def indices(self) -> Tensor:
        """What is found, as far as the list has room."""
        return self.found.indices

    def is_listed(self) -> Tensor:
        """Return whether that is all."""
        return self.found.count <= self.found.room

    def numbers(self) -> Tensor:
        """Return the count."""
        count = self.found.count
        return count.where(count <= self.found.room, UNKNOWN).double().view(1)

    def read(self, numbers: Sequence[float]) -> Selection:
        """Return what was found, and remember how much that is."""
        self.state.last_count = int(numbers[0])
        return Selection(self.found.read(int(numbers[0]))[0], threshold=self.threshold)

    def retry(self) -> Selection:
        """Return all, however many there are, and remember how many."""
        selection = _above(self.acc, self.threshold)
        self.state.last_count = selection.indices.numel()
        return selection


def hard_threshold(k: int) -> float:
    """Return 1 / (2 sqrt k), the total-error rule's threshold for k elements per step."""
    return 1.0 / (2.0 * math.sqrt(k))
