"""Correct an estimated threshold by what earlier steps selected: one scan, one learned factor.

A law fitted to all entries says little about the few largest, so a threshold estimated from it may select ten times too
many or too few; but its error changes little from step to step. `select_near` therefore multiplies the estimate by a
factor learned from earlier steps. After a step that selected ``count`` entries, their mean log excess over the
threshold gives the factor that would have selected k. `micro.selectors.steering` filters these factors.

Everything is local to a rank, and relative: scaling the input by c scales estimate and threshold by c.
"""

import math

import torch
from torch import Tensor

from micro import kernels
from micro.selectors.steering import Track
from micro.values.sparse import Selection

UPPER = 4 / 3  # more than this times k: the k largest of what was found are kept
LOWER = 2 / 3  # less than this times k, before anything was learned: search the k largest
LOST = 1 / 2  # the same at any later step; above 1 / LOST times k: the past says nothing about this step

Entries = tuple[Tensor, Tensor]  # indices (n,) int32, ascending, and magnitudes (n,)


def select_near(track: Track, acc: Tensor, guess: float, k: int) -> Selection:
    """Return what is at or above the corrected estimate: between k / 2 and ``UPPER * k`` indices.

    One scan of acc. Where more than ``UPPER * k`` pass, exactly the k largest of them are kept, which needs no further
    scan. Where fewer than k pass, they are all that is sent, and the next estimate is corrected. A second scan, for
    exactly the k largest, happens only where fewer than k / 2 pass (2k / 3 at a rank's first step), or where the
    estimate is no positive number. Zeros are never selected.

    Args:
        track: of this rank's factor; changed.
        acc: (numel,) gradient + residual. Not modified. Finite.
        guess: the estimated threshold for k on abs(acc), without correction; any number, NaN included.
        k: wanted number of indices on this rank, >= 1.
    """
    k = min(k, acc.numel())
    threshold = guess * math.exp(track.log_threshold) if 0 < guess < math.inf else 0.0
    if not torch.finfo(acc.dtype).tiny <= threshold <= torch.finfo(acc.dtype).max:
        return _restart(track, guess, largest_positive(acc, k))
    indices, magnitudes = kernels.above(acc, threshold)
    count = indices.numel()
    if count < k * (LOST if track.age else LOWER):
        return _restart(track, guess, largest_positive(acc, k))
    if count * LOST > k:
        return _restart(track, guess, largest_of(indices, magnitudes, k))
    tail = _mean_log_excess(magnitudes, threshold)
    track.observe(threshold=threshold / guess, count=count, tail=tail, k=k)
    if count > UPPER * k:
        indices, magnitudes = largest_of(indices, magnitudes, k)
        threshold = float(magnitudes.min())  # host sync: the cut, where too many passed
    return Selection(indices, threshold=threshold)


def strictly_above(x: Tensor, threshold: float) -> Entries:
    """Return the entries of ``x`` (numel,) with abs(x) > threshold, which is rounded to its dtype."""
    cut = torch.tensor(threshold, dtype=x.dtype)
    return kernels.above(x, float(torch.nextafter(cut, torch.full_like(cut, math.inf))))


def above_or_largest(x: Tensor, floor: float | None, fewest: int, most: int) -> Entries:
    """Return what reaches the floor, where there is one and at least ``fewest`` do; else the ``most`` largest."""
    if floor is not None:
        found = kernels.above(x, floor)
        if found[0].numel() >= fewest:
            return found
    return largest_positive(x, most)


def largest_positive(x: Tensor, k: int) -> Entries:
    """Return the k largest, or all that are not zero where there are fewer."""
    indices = kernels.largest(x, k)
    magnitudes = x.index_select(0, indices).abs()
    places = magnitudes.nonzero().view(-1)
    return indices.index_select(0, places), magnitudes.index_select(0, places)


def largest_of(indices: Tensor, magnitudes: Tensor, k: int) -> Entries:
    """Return the k largest of what was found."""
    places = kernels.largest(magnitudes, k)
    return indices.index_select(0, places), magnitudes.index_select(0, places)


def _restart(track: Track, guess: float, found: Entries) -> Selection:
    """Select all that was found and restart the track at the smallest of it: that factor gives as many."""
    track.restart()
    indices, magnitudes = found
    if not indices.numel():
        return Selection(indices)
    cut = float(magnitudes.min())  # host sync: the cut, where the track restarts
    factor = cut / guess if guess > 0 else math.inf
    if 0 < factor < math.inf:
        k = indices.numel()
        track.observe(threshold=factor, count=k, tail=_mean_log_excess(magnitudes, cut), k=k)
    return Selection(indices, threshold=cut)


def _mean_log_excess(magnitudes: Tensor, threshold: float) -> float:
    excess = float(magnitudes.log().mean()) - math.log(threshold)  # host sync: what the next guess is corrected by
    return max(excess, 0.0)
