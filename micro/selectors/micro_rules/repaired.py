"""One threshold, steered by the last step's count: the idea of the published rule with a repaired controller."""

from typing import ClassVar

import torch

from micro import kernels
from micro.on_device import on_device
from micro.requests import AllGather, AllReduce, Reduction
from micro.selectors.micro_rules.base import Search, ThresholdRule
from micro.selectors.micro_rules.quantile import bins_inside, coarse_bin, magnitude_bins, threshold_from_bins
from micro.selectors.steering import Track, Tracked, aim, observe
from micro.sparse import Selection
from micro.traffic import Calls


class Repaired(ThresholdRule[Tracked]):
    """Steer the threshold by the last count and by the slope of the tail; start from the gradient's own quantile.

    Each rank sends its count and the sum of log(abs(acc) / threshold) over what it selected: 16 bytes. From their sums
    all ranks forecast the same next threshold (`micro.selectors.steering`). The first steps, and those after the scale
    of the gradients jumped, search for the quantile instead, with two small all-reduces.
    """

    state: ClassVar[type[Tracked]] = Tracked

    def search(self, state: Tracked, search: Search) -> Reduction[Selection]:
        """Take what is at or above the threshold, at a density of 1 everything; an empty slice sends nothing."""
        everything = search.everything()
        if everything is not None:
            return everything
        k, device = search.step.target_count, search.slice.device
        if state.k not in (0, k):  # a density that changes with time
            state.track = aim(state.track, state.k, k)
        state.k = k
        threshold = state.track.threshold
        if threshold is None:
            threshold = yield from _quantile(search, k)
        if threshold is None:  # all ranks know: every slice is zero
            state.track = Track()
            nothing = torch.empty(0, dtype=torch.int32, device=device)
            return Selection(nothing, counts=(0,) * search.comm.world_size, threshold=0.0)
        indices, magnitudes = kernels.above_with_magnitudes(search.slice, threshold)
        count = on_device([magnitudes.numel()], torch.float64, device).view(())
        logs = (magnitudes.to(torch.float64) / threshold).log()
        headers = yield AllGather(mine=torch.stack([count, logs.sum()]), read=True)
        rows = headers.tolist()
        counts = tuple(int(number) for number, _ in rows)
        total = sum(counts)
        tail = sum(log for _, log in rows) / total if total else 0.0
        state.track = observe(state.track, threshold=threshold, count=total, tail=tail, k=k)
        return Selection(indices + search.start, counts=counts, threshold=threshold)

    def calls(self, count: int, longest: int, numel: int, world_size: int) -> Calls:
        """Return the gathering of counts and sums of logarithms; at a density of 1 nothing travels."""
        return () if count == numel else (("gather_rows", 16),)  # as float64


def _quantile(search: Search, k: int) -> Reduction[float | None]:
    """Return the threshold that k elements of all slices together reach, or None where all are zero."""
    counts = yield AllReduce(mine=magnitude_bins(search.slice), kind="counts")
    coarse = coarse_bin(counts, k)
    if coarse is None:
        return None
    fine = yield AllReduce(mine=bins_inside(search.slice, coarse), kind="counts")
    return threshold_from_bins(counts, fine, k)
