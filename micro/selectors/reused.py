"""Reused threshold: this rank's k largest magnitudes, found from the k-th magnitude of the step before."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.comm import Comm
from micro.kernels import reference
from micro.on_device import on_device
from micro.selectors.asking import Asking
from micro.selectors.fitting import Estimating
from micro.selectors.unread import UNKNOWN, Listed, counted
from micro.sparse import Selection, Step

SLACK = 0.95  # candidates begin this far below the last k-th magnitude: room for it to fall by the next step
PLENTY = 4.0  # room of an accelerator's list, for each index that is wanted: accumulators grow fast at first
SMALLEST = 2.0**-149  # the smallest positive float32: zeros are never chosen


@dataclass(slots=True)
class ReusedState:
    """The threshold that the next step begins with, in units of the accumulator; None where it must be searched."""

    threshold: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused(Estimating[ReusedState]):
    """Select this rank's k largest magnitudes, among what passes 0.95 of the last step's k-th magnitude.

    Magnitudes change slowly from step to step, so one scan by the last threshold replaces a search. What passes is cut
    to the k largest (ties go to the lowest index); only where fewer than k pass is the whole vector searched. So
    min(k, non-zero) are selected, and no zeros. Each rank selects on its own, with a threshold of its own.

    Source: Li and Hoefler, Ok-Topk, PPoPP 2022, arXiv 2201.07598 (selection). Differences: never more than k, which the
    paper's volume assumes, and no controller of the count. `PublishedReused` follows the public code.
    """

    name: ClassVar[str] = "reused"
    rule: ClassVar[str] = "repaired"
    reads_late: ClassVar[bool] = True

    def start(self) -> ReusedState:
        """Return the state before the first step."""
        return ReusedState()

    def choosing(self, state: ReusedState, acc: Tensor, step: Step, comm: Comm) -> Asking[Selection]:
        """Choose the k largest, or all that are not zero where there are fewer; see Selector."""
        if acc.device.type == "cpu":
            return _largest(state, acc, step.target_count)
        return (yield from counted(_Passing(state, acc, step.target_count), step, comm))


def _largest(state: ReusedState, acc: Tensor, k: int) -> Selection:
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


class _Passing(Listed):
    """The k largest of what passes the last step's threshold, where it is known, in a list with room for it."""

    def __init__(self, state: ReusedState, acc: Tensor, k: int) -> None:
        self.state, self.acc, self.k = state, acc, k
        cut = None if state.threshold is None else max(state.threshold, SMALLEST)
        self.found = None if cut is None else kernels.above_unread(acc, cut, math.ceil(PLENTY * k))

    @property
    def indices(self) -> Tensor:
        """The k largest of what is in the list, (k,)."""
        if self.found is None or self.found.room < self.k:
            return torch.arange(self.k, dtype=torch.int32, device=self.acc.device)
        return self.found.indices.index_select(0, reference.largest(self.found.magnitudes, self.k))

    def is_listed(self) -> Tensor:
        """Return whether k are known."""
        return self.numbers()[0] != UNKNOWN

    def numbers(self) -> Tensor:
        """Return k, where as many pass and the list has room for all that do, and the k-th magnitude."""
        if self.found is None or self.found.room < self.k:
            return on_device([UNKNOWN, 0.0], torch.float64, self.acc.device)
        count = self.found.count
        is_known = (count >= self.k) & (count <= self.found.room)
        kth = torch.topk(self.found.magnitudes, self.k, sorted=False).values.amin()
        return torch.stack([torch.full_like(count, self.k).where(is_known, UNKNOWN).double(), kth.double()])

    def read(self, numbers: Sequence[float]) -> Selection:
        """Return the k largest, and remember the smallest of them."""
        assert self.found is not None
        self.state.threshold = SLACK * numbers[1]
        kept = reference.largest(self.found.magnitudes, self.k)
        return Selection(self.found.indices.index_select(0, kept), threshold=numbers[1])

    def retry(self) -> Selection:
        """Return what a host that reads chooses."""
        return _largest(self.state, self.acc, self.k)


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
