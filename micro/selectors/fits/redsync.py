"""RedSync: every rank bisects for a threshold that between k and 2k magnitudes pass."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.norms import norm
from micro.parts import NoState, Rule
from micro.selectors.estimated import Fit
from micro.selectors.fits.correction import above_or_largest
from micro.sparse import Selection, Step

MARGIN = 3  # candidates per k that the floor aims at: room for their number to fall to k by the next step
SMALLEST = 2.0**-126  # of the normal float32: a floor above zero, so that zeros are no candidates
RESOLUTION = 0.2  # the public code stops where the bracket of q is no wider: after 3 rounds


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
    state: ClassVar[type[RedSyncState]] = RedSyncState

    def select(self, state: RedSyncState, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return k to 2k of the candidates, or all where there are at most k, and set the floor of the next step.

        How many pass a threshold is at least k up to the k-th magnitude, and at most 2k above the (2k + 1)-th: the
        bisection needs no more than these two.
        """
        indices, magnitudes = above_or_largest(acc, state.floor, k, MARGIN * k)
        count = magnitudes.numel()
        if not count:
            state.floor = None
            return Selection(indices)
        marks = kernels.ranked(magnitudes, (min(k, count), min(2 * k + 1, count)))
        lowest_and_largest = torch.stack(torch.aminmax(magnitudes))
        spread = magnitudes.log().mean(dtype=torch.float64)
        numbers = torch.cat([marks.double(), lowest_and_largest.double(), spread[None]])
        kth, beyond, lowest, largest, mean_log = numbers.tolist()  # host sync: the thresholds
        state.floor = _next_floor(lowest, mean_log, count / (MARGIN * k))
        if count <= 2 * k:
            return Selection(indices, threshold=lowest)
        if kth == beyond:
            return Selection(indices.index_select(0, kernels.largest(magnitudes, k)), threshold=kth)
        threshold = bisect(lowest, largest, above=beyond, up_to=kth, dtype=magnitudes.dtype)
        return Selection(indices.index_select(0, (magnitudes >= threshold).nonzero().view(-1)), threshold=threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRedSync(Fit[NoState]):
    """A threshold that three rounds of bisection find, in the form in which public code compares the method.

    The threshold is mean + q (largest - mean). q is bisected in 3 rounds, and what the last one found is sent, however
    many; a count between k / 2 and k raises the threshold.

    Source: RedSync as a baseline in the public code of Shi et al., arXiv 1911.08772. Differences from the paper: no
    quantisation of values of one sign; no switch by tensor size; momentum correction is a feedback of its own.
    """

    name: ClassVar[str] = "redsync_published"
    rule: ClassVar[Rule] = "published"

    def select(self, state: NoState, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return what passes the threshold of the last round."""
        mean = float(norm(acc, 1)) / acc.numel()  # host sync: the thresholds
        largest = float(torch.linalg.vector_norm(acc, math.inf))  # host sync: the thresholds
        low, high = 0.0, 1.0
        while high - low > RESOLUTION:
            middle = low + (high - low) / 2
            threshold = mean + middle * (largest - mean)
            indices, magnitudes = kernels.above(acc, threshold)
            count = int((magnitudes > threshold).sum())  # host sync: the next round's threshold
            if k < count < 2 * k:
                break
            low, high = (low, middle) if count < k / 2 else (middle, high)
        return Selection(indices[magnitudes > threshold], threshold=threshold)


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


def _next_floor(lowest: float, mean_log: float, share: float) -> float:
    """Return where MARGIN * k are expected, of which there are ``share``: as far from the lowest as their tail says."""
    tail = max(mean_log - math.log(lowest), 0.0)
    return max(lowest * math.exp(tail * (math.log(share) if share > 1 else share - 1)), SMALLEST)
