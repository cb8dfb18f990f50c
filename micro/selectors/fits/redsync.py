"""RedSync: every rank bisects for a threshold that between k and 2k magnitudes pass."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.selectors.estimated import Fit
from micro.sparse import Selection, Step

MARGIN = 3  # candidates per k that the floor aims at: room for their number to fall to k by the next step
SMALLEST = 2.0**-126  # of the normal float32: a floor above zero, so that zeros are no candidates


@dataclass(slots=True)
class RedSyncState:
    """The floor above which the next step looks for candidates; None where it is not known."""

    floor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RedSync(Fit[RedSyncState]):
    """A threshold between a floor and the largest magnitude, bisected until k to 2k pass.

    Because any count up to 2k is accepted, a coarse threshold serves in place of a sort. One scan collects about 3k
    candidates above a floor that follows them from step to step; the bisection runs among those.

    Source: Fang et al., RedSync, arXiv 1808.04357 (the threshold binary search, for large tensors). Differences: no
    quantisation of values of one sign; no switch by tensor size (the trimmed top-k for tensors of medium size chooses
    what `topk` does); momentum correction is a feedback of its own; the bracket starts at the floor, not at the mean;
    ties across 2k are cut to k; zeros are never sent.
    """

    name: ClassVar[str] = "redsync"

    def start(self) -> RedSyncState:
        """Return the state before the first step."""
        return RedSyncState()

    def select(self, state: RedSyncState, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return what passes the bisected threshold."""
        return _bisected(state, *_candidates(state, acc, k), k)


def _candidates(state: RedSyncState, acc: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return what is above the floor, indices and magnitudes; where that is too little, the MARGIN * k largest."""
    if state.floor is not None:
        indices, magnitudes = kernels.above_with_magnitudes(acc, state.floor)
        if indices.numel() >= k:
            return indices, magnitudes
    indices = kernels.largest(acc, MARGIN * k)
    magnitudes = acc.index_select(0, indices).abs()
    places = magnitudes.nonzero().view(-1)
    return indices.index_select(0, places), magnitudes.index_select(0, places)


def _bisected(state: RedSyncState, indices: Tensor, magnitudes: Tensor, k: int) -> Selection:
    """Return k to 2k of the candidates, or all where there are at most k, and set the floor of the next step.

    How many pass a threshold is at least k up to the k-th magnitude, and at most 2k above the (2k + 1)-th: the
    bisection needs no more than these two.
    """
    count = magnitudes.numel()
    if not count:
        state.floor = None
        return Selection(indices)
    marks = kernels.ranked(magnitudes, (min(k, count), min(2 * k + 1, count)))
    lowest_and_largest = torch.stack(torch.aminmax(magnitudes))
    spread = magnitudes.log().mean(dtype=torch.float64)
    numbers = torch.cat([marks.double(), lowest_and_largest.double(), spread[None]])
    kth, beyond, lowest, largest, mean_log = numbers.tolist()  # host sync: the thresholds
    state.floor = _next_floor(lowest, mean_log, count, k)
    if count <= 2 * k:
        return Selection(indices, threshold=lowest)
    if kth == beyond:
        return Selection(indices.index_select(0, kernels.largest(magnitudes, k)), threshold=kth)
    threshold = bisect(lowest, largest, above=beyond, up_to=kth, dtype=magnitudes.dtype)
    return Selection(indices.index_select(0, (magnitudes >= threshold).nonzero().view(-1)), threshold=threshold)


def bisect(low: float, high: float, *, above: float, up_to: float, dtype: torch.dtype) -> float:
    """Return the first middle of [low, high], bisected, that lies in (above, up_to] and is a number of ``dtype``.

    ``low <= above < up_to <= high`` are of that dtype.
    """
    while True:
        middle = low + (high - low) / 2
        rounded = float(torch.tensor(middle, dtype=dtype))  # on the host; a comparison of tensors rounds the same way
        if above < rounded <= up_to:
            return rounded
        if middle in (low, high):
            return up_to  # neighbouring numbers: nothing lies between them
        low, high = (middle, high) if rounded <= above else (low, middle)


def _next_floor(lowest: float, mean_log: float, count: int, k: int) -> float:
    """Return where MARGIN * k are expected: so far above or below the lowest of ``count`` as their tail says."""
    tail, share = max(mean_log - math.log(lowest), 0.0), count / (MARGIN * k)
    return max(lowest * math.exp(tail * (math.log(share) if share > 1 else share - 1)), SMALLEST)
