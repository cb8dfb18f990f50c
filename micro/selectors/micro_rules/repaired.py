"""One threshold, steered by the last step's count: the idea of the published rule with a repaired controller."""

from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.kernels.bit_patterns import magnitude_of
from micro.on_device import on_device
from micro.requests import AllGather, AllReduce, Reduction, known
from micro.selectors import scans
from micro.selectors.micro_rules.base import SHIFT, Search, ThresholdRule, magnitude_bins
from micro.selectors.steering import Track
from micro.sparse import Selection
from micro.traffic import Calls

FINE_SHIFT = SHIFT - 11  # a fine bin is 1 / 2048 of a coarse one: 1 part in 8192 or less


class Repaired(ThresholdRule[Track]):
    """Steer the threshold by the last count and by the slope of the tail; start from the gradient's own quantile.

    Each rank sends its count and the sum of log(abs(acc) / threshold) over what it selected: 16 bytes. From their sums
    all ranks forecast the same next threshold (`micro.selectors.steering`). The first steps, and those after the scale
    of the gradients jumped, search for the quantile instead, with two small all-reduces.
    """

    state: ClassVar[type[Track]] = Track

    def search(self, state: Track, search: Search) -> Reduction[Selection]:
        """Take what is at or above the threshold, at a density of 1 everything; an empty slice sends nothing."""
        everything = search.everything()
        if everything is not None:
            return everything
        k, device = search.step.target_count, search.slice.device
        state.aim(k)
        threshold = state.threshold
        if threshold is None:
            threshold = yield from quantile(search.slice, k)
        if threshold is None:  # all ranks know: every slice is zero
            state.restart()
            nothing = torch.empty(0, dtype=torch.int32, device=device)
            return Selection(nothing, counts=(0,) * search.comm.world_size, threshold=0.0)
        indices, magnitudes = yield from scans.above(search.slice, threshold)
        count = on_device([magnitudes.numel()], torch.float64, device).view(())
        logs = (magnitudes.to(torch.float64) / threshold).log()
        (headers,) = yield from known((yield AllGather(mine=torch.stack([count, logs.sum()]))))
        rows = headers.tolist()
        counts = tuple(int(number) for number, _ in rows)
        total = sum(counts)
        tail = sum(log for _, log in rows) / total if total else 0.0
        state.observe(threshold=threshold, count=total, tail=tail, k=k)
        return Selection(indices + search.start, counts=counts, threshold=threshold)

    def calls(self, count: int, longest: int, numel: int, world_size: int) -> Calls:
        """Return the gathering of counts and sums of logarithms; at a density of 1 nothing travels."""
        return () if count == numel else (("gather_rows", 16),)  # as float64


def quantile(x: Tensor, k: int) -> Reduction[float | None]:
    """Return the threshold that k magnitudes of all ranks' ``x`` (m,) together reach, or None where all are zero.

    It is found from two histograms, the second inside a bin of the first, and lies just above the (k + 1)-th largest,
    which leaves the tail of the selected unbiased. A tie across k is taken whole or left whole, whichever count is
    nearer to k by ratio, but something is always selected. Where there are at most k magnitudes, all are. The threshold
    is exact in float32; scaling the input by c scales it by c.
    """
    counts = yield AllReduce(mine=magnitude_bins(x), kind="counts")
    found = _locate(counts, k + 1)
    if found is None:
        return None
    coarse, above = found
    first = coarse << SHIFT
    inside = kernels.magnitude_counts(x, first_bit_pattern=first, shift=FINE_SHIFT, num_bins=2048)
    fine = yield AllReduce(mine=inside, kind="counts")
    found = _locate(fine, k + 1 - above)
    assert found is not None, "the coarse bin that was located holds something"
    within, above = found[0], above + found[1]
    reached = above + int(fine[within])
    if reached > k and above * reached >= k * k:
        within += 1  # the edge above the tie leaves the nearer count
    return magnitude_of(max(first + (within << FINE_SHIFT), 1))


def _locate(counts: Tensor, rank: int) -> tuple[int, int] | None:
    """Return (bin of the rank-th largest, or of the smallest if there are fewer; entries above it); None if empty."""
    reached, found = 0, None
    for index, count in reversed(list(enumerate(counts.tolist()))):  # host sync: a searched step only
        if count and reached < rank:
            found, reached = (index, reached), reached + count
    return found
