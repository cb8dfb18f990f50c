"""One threshold, steered by the last step's count: the idea of the published rule with a repaired controller."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from micro import kernels
from micro.on_device import on_device
from micro.selectors.asking import Ask, Asking
from micro.selectors.histogram import magnitude_bins
from micro.selectors.micro_rules.base import Found, Search, ThresholdRule, everything
from micro.selectors.quantile import bins_inside, coarse_bin, threshold_from_bins
from micro.selectors.steering import Track, aim, observe

PLENTY = 4.0  # room for what passes, per index that is wanted of all ranks, where the host does not read their number


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

    def search(self, state: RepairedState, search: Search) -> Asking[Found]:
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
        indices, rows, is_retried = yield from _counted(search, threshold, math.ceil(PLENTY * k))
        counts = tuple(int(count) for count, _ in rows)
        total = sum(counts)
        tail = sum(logs for _, logs in rows) / total if total else 0.0
        state.track = observe(track, threshold=threshold, count=total, tail=tail, k=k)
        return Found(indices + search.start, counts, threshold, overfull=is_retried)


def _quantile(search: Search, k: int) -> Asking[float | None]:
    """Return the threshold that k elements of all slices together reach, or None where all are zero."""
    counts = yield Ask("all_reduce", magnitude_bins(search.slice))
    coarse = coarse_bin(counts, k)
    if coarse is None:
        return None
    fine = yield Ask("all_reduce", bins_inside(search.slice, coarse))
    return threshold_from_bins(counts, fine, k)


def _counted(search: Search, threshold: float, room: int) -> Asking[tuple[Tensor, list[list[float]], bool]]:
    """Return this rank's indices in its slice at or above the threshold, and every rank's count and sum of logarithms.

    Also whether a rank's list was full, so that these travelled twice.

    Args:
        room: of the list, where the count is read with those of the others; ranks whose lists are full count again.
    """
    if search.slice.device.type != "cpu":
        found = kernels.above_unread(search.slice, threshold, room)
        logs = _logs(found.magnitudes, threshold).where(found.magnitudes > 0, 0.0)
        headers = yield Ask("gather_rows", torch.stack([found.count.double(), logs.sum()]), is_read=True)
        rows: list[list[float]] = headers.tolist()
        if max(count for count, _ in rows) <= room:
            return found.read(int(rows[search.comm.rank][0]))[0], rows, False
    indices, magnitudes = kernels.above_with_magnitudes(search.slice, threshold)
    count = on_device([magnitudes.numel()], torch.float64, magnitudes.device).view(())
    headers = yield Ask("gather_rows", torch.stack([count, _logs(magnitudes, threshold).sum()]), is_read=True)
    return indices, headers.tolist(), search.slice.device.type != "cpu"


def _logs(magnitudes: Tensor, threshold: float) -> Tensor:
    return (magnitudes.to(torch.float64) / threshold).log()
