"""One threshold, steered by the last step's count: the idea of the published rule with a repaired controller."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from micro import kernels
from micro.on_device import on_device
from micro.requests import AllGather, AllReduce, Reduction
from micro.selectors.micro_rules.base import Found, Search, ThresholdRule, everything
from micro.selectors.micro_rules.quantile import bins_inside, coarse_bin, magnitude_bins, threshold_from_bins
from micro.selectors.steering import Track, aim, observe
from micro.traffic import Calls


@dataclass(slots=True)
class RepairedState:
    """What the ranks know about the next step's threshold, and the count that it is aimed at."""

    track: Track = field(default_factory=Track)
    last_k: int = 0


class Repaired(ThresholdRule[RepairedState]):
    """Steer the threshold by the last count and by the slope of the tail; start from the gradient's own quantile.

    Each rank sends its count and the sum of log(abs(acc) / threshold) over what it selected: 16 bytes. From their sums
    all ranks forecast the same next threshold (`micro.selectors.steering`). The first steps, and those after the scale
    of the gradients jumped, search for the quantile instead, with two small all-reduces.
    """

    def start(self) -> RepairedState:
        """Return the state before the first step."""
        return RepairedState()

    def load(self, saved: dict[str, Any]) -> RepairedState:
        """Return the state from its plain form."""
        return RepairedState(Track(**saved["track"]), saved["last_k"])

    def search(self, state: RepairedState, search: Search) -> Reduction[Found]:
        """Take what is at or above the threshold, at a density of 1 everything; an empty slice sends nothing."""
        if search.wants_all:
            return everything(search)
        search = search.copied()
        k, track = search.step.target_count, state.track
        if state.last_k not in (0, k):  # a density that changes with time
            track = aim(track, state.last_k, k)
        state.last_k = k
        threshold = track.threshold if track.threshold is not None else (yield from _quantile(search, k))
        if threshold is None:  # all ranks know: every slice is zero
            nothing = torch.empty(0, dtype=torch.int32, device=search.slice.device)
            state.track = Track()
            return Found(nothing, (0,) * search.comm.world_size, 0.0)
        indices, rows = yield from _counted(search, threshold)
        counts = tuple(int(count) for count, _ in rows)
        total = sum(counts)
        tail = sum(logs for _, logs in rows) / total if total else 0.0
        state.track = observe(track, threshold=threshold, count=total, tail=tail, k=k)
        return Found(indices + search.start, counts, threshold)

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


def _counted(search: Search, threshold: float) -> Reduction[tuple[Tensor, list[list[float]]]]:
    """Return this rank's indices in its slice from the threshold on, and every rank's count and sum of logarithms."""
    indices, magnitudes = kernels.above_with_magnitudes(search.slice, threshold)
    count = on_device([magnitudes.numel()], torch.float64, magnitudes.device).view(())
    logs = (magnitudes.to(torch.float64) / threshold).log()
    headers = yield AllGather(mine=torch.stack([count, logs.sum()]), read=True)
    return indices, headers.tolist()
