"""Correct an estimated threshold by what earlier steps selected: one scan, one learned factor.

A law fitted to all entries says little about the few largest, so a threshold estimated from it may select ten times too
many or too few; but its error changes little from step to step. `select_near` therefore multiplies the estimate by a
factor learned from earlier steps. After a step that selected ``count`` entries, their mean log excess over the
threshold (the inverse slope of log count against log threshold: Hill, Annals of Statistics 1975) gives the factor that
would have selected k. `micro.selectors.steering` filters these factors.

Everything is local to a rank, and relative: scaling the input by c scales estimate and threshold by c.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from micro import kernels
from micro.selectors.steering import Track, observe
from micro.sparse import Selection

UPPER = 4 / 3  # more than this times k: the k largest of what was found are kept
LOWER = 2 / 3  # less than this times k, before anything was learned: search the k largest
LOST = 1 / 2  # the same at any later step; above 1 / LOST times k: the past says nothing about this step


@dataclass(slots=True)
class Correction:
    """What a rank has learned about its estimates. ``asdict`` saves it, ``Correction(**saved)`` restores it.

    Attributes:
        track: of the factor on the estimate (its ``log_threshold`` is the factor's logarithm).
    """

    track: Track = field(default_factory=Track)

    def __post_init__(self) -> None:
        if isinstance(self.track, dict):  # as saved
            self.track = Track(**self.track)


def select_near(state: Correction, acc: Tensor, guess: float, k: int, *, upper: float = UPPER) -> Selection:
    """Return what is at or above the corrected estimate: between k / 2 and ``upper * k`` indices.

    One scan of acc. Where more than ``upper * k`` pass, exactly the k largest of them are kept, which needs no further
    scan. Where fewer than k pass, they are all that is sent, and the next estimate is corrected. A second scan, for
    exactly the k largest, happens only where fewer than k / 2 pass (2k / 3 at a rank's first step), or where the
    estimate is no positive number. Zeros are never selected.

    Args:
        state: this rank's; changed.
        acc: (numel,) gradient + residual. Not modified. Finite.
        guess: the estimated threshold for k on abs(acc), without correction; any number, NaN included.
        k: wanted number of indices on this rank, >= 1.
    """
    k = min(k, acc.numel())
    threshold = _corrected(state, guess, acc.dtype)
    if threshold is None:
        return _k_largest(state, acc, guess, k)
    indices, magnitudes = kernels.above_with_magnitudes(acc, threshold)
    count = indices.numel()
    if count < k * (LOST if state.track.age else LOWER):
        return _k_largest(state, acc, guess, k)
    if count * LOST > k:
        return _restart(state, guess, *_largest_of(indices, magnitudes, k))
    tail = _mean_log_excess(magnitudes, threshold)
    state.track = observe(state.track, threshold=threshold / guess, count=count, tail=tail, k=k)
    if count > upper * k:
        indices, magnitudes = _largest_of(indices, magnitudes, k)
        threshold = float(magnitudes.min())  # host sync: the cut, where too many passed
    return Selection(indices, threshold=threshold)


def strictly_above(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return indices (n,) int32 and magnitudes (n,) of ``x`` (numel,) with abs(x) > threshold, rounded to its dtype."""
    cut = torch.tensor(threshold, dtype=x.dtype)
    return kernels.above_with_magnitudes(x, float(torch.nextafter(cut, torch.full_like(cut, math.inf))))


def _corrected(state: Correction, guess: float, dtype: torch.dtype) -> float | None:
    """Return the estimate times the factor, or None where that is no normal number of ``dtype``."""
    if not 0 < guess < math.inf:
        return None
    threshold = guess * math.exp(state.track.log_threshold)
    return threshold if torch.finfo(dtype).tiny <= threshold <= torch.finfo(dtype).max else None


def _k_largest(state: Correction, acc: Tensor, guess: float, k: int) -> Selection:
    """Return the k largest, or all that are not zero where there are fewer, and restart the track from them."""
    indices = kernels.largest(acc, k)
    magnitudes = acc.index_select(0, indices).abs()
    places = magnitudes.nonzero().view(-1)
    return _restart(state, guess, indices.index_select(0, places), magnitudes.index_select(0, places))


def _restart(state: Correction, guess: float, indices: Tensor, magnitudes: Tensor) -> Selection:
    """Select all of ``indices`` and restart the track at the smallest of ``magnitudes``: that factor gives k."""
    state.track = Track()
    k = indices.numel()
    if not k:
        return Selection(indices)
    cut = float(magnitudes.min())  # host sync: the cut, where the track restarts
    factor = cut / guess if guess > 0 else math.inf
    if 0 < factor < math.inf:
        tail = _mean_log_excess(magnitudes, cut)
        state.track = observe(state.track, threshold=factor, count=k, tail=tail, k=k)
    return Selection(indices, threshold=cut)


def _largest_of(indices: Tensor, magnitudes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of what was found, ascending by index, and their magnitudes."""
    places = kernels.largest(magnitudes, k)
    return indices.index_select(0, places), magnitudes.index_select(0, places)


def _mean_log_excess(magnitudes: Tensor, threshold: float) -> float:
    excess = float(magnitudes.log().mean()) - math.log(threshold)  # host sync: what the next guess is corrected by
    return max(excess, 0.0)
