"""Correct the threshold that a fitted law guesses by what it selected before: one scan, one learned factor.

A law fitted to all entries says little about the few at its far end, so a guess made from it can be off by an order of
magnitude in what it selects; but it is off alike from step to step. `select_near` therefore multiplies the guess by a
factor learned from earlier steps. After a step with ``count`` entries at a threshold their mean log excess, the inverse
slope of log count against log threshold (Hill, Annals of Statistics 1975), tells which factor would have given k:
`micro.selectors.steering` filters these, here applied to the factor in place of the threshold.

Everything is local to a rank, and relative: scaling the input by c scales guess and threshold by c.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from micro import kernels
from micro.selectors.steering import Track, observe
from micro.sparse import Selection

UPPER = 4 / 3  # more than this times k: the k largest of what was found are kept
LOWER = 2 / 3  # less than this times k, before anything was learned: look once more
LOST = 1 / 2  # the same at any later step, and beyond 1 / LOST: the past says nothing about this step


@dataclass(slots=True)
class Correction:
    """What a rank has learned about a law's guesses. ``asdict`` saves it, ``Correction(**saved)`` restores it.

    Attributes:
        track: of the factor on the guess, in place of the threshold.
    """

    track: Track = field(default_factory=Track)

    def __post_init__(self) -> None:
        if isinstance(self.track, dict):  # as saved
            self.track = Track(**self.track)


def select_near(state: Correction, acc: Tensor, guess: float, k: int, *, upper: float = UPPER) -> Selection:
    """Return what is at or above the corrected guess: between k / 2 and ``upper * k`` indices.

    One scan of acc. Where more than ``upper * k`` pass, exactly the k largest of them are kept, which needs no further
    scan. Where fewer than k pass, they are all that is sent, and the next guess is corrected. Only a rank that has lost
    track (fewer than k / 2; 2k / 3 at its first step), or whose guess is no positive number, searches once more, for
    exactly the k largest. Zeros are never selected.

    Args:
        state: this rank's; changed.
        acc: (numel,) gradient + residual. Not modified. Finite.
        guess: the law's threshold for k on abs(acc), without correction; any number, NaN included.
        k: wanted number of indices on this rank, >= 1.
    """
    k = min(k, acc.numel())
    threshold = _corrected(state, guess, acc.dtype)
    if threshold is None:
        return _exactly(state, acc, guess, k)
    indices, magnitudes = kernels.above_with_magnitudes(acc, threshold)
    count = indices.numel()
    if count < k * (LOST if state.track.age else LOWER):
        return _exactly(state, acc, guess, k)
    if count * LOST > k:
        return _anchor(state, guess, *_largest_of(indices, magnitudes, k))
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
    """Return the guess times the factor, or None where no cut can be made there (a tiny one would round to zero)."""
    if not 0 < guess < math.inf:
        return None
    threshold = guess * math.exp(state.track.log_threshold)
    return threshold if torch.finfo(dtype).tiny <= threshold <= torch.finfo(dtype).max else None


def _exactly(state: Correction, acc: Tensor, guess: float, k: int) -> Selection:
    """Return the k largest, or all that are not zero where there are fewer; learn from them anew."""
    indices = kernels.largest(acc, k)
    magnitudes = acc.index_select(0, indices).abs()
    places = magnitudes.nonzero().view(-1)
    return _anchor(state, guess, indices.index_select(0, places), magnitudes.index_select(0, places))


def _anchor(state: Correction, guess: float, indices: Tensor, magnitudes: Tensor) -> Selection:
    """Begin a new track at the smallest of what is selected, which is just what was wanted."""
    state.track = Track()
    k = indices.numel()
    if not k:
        return Selection(indices)
    cut = float(magnitudes.min())  # host sync: the cut, where track was lost
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
