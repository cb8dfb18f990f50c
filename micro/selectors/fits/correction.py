"""Correct an estimated threshold with a factor learned from the counts of earlier steps.

A distribution fitted to all entries is inaccurate for the few largest, so its threshold may select ten times too many
or too few; but its error changes little between steps. `select_near` therefore multiplies the estimate by a factor
learned from earlier steps. After a step that selected ``count`` entries, their mean log excess over the threshold gives
the factor that would have selected k. `micro.selectors.steering` filters these factors.

Everything is local to a rank, and relative: scaling the input by c scales estimate and threshold by c.
"""

import math

import torch
from torch import Tensor

from micro import kernels
from micro.selectors.steering import Track
from micro.values.sparse import Selection

UPPER = 4 / 3  # with more than this times k, only the k largest are kept
LOWER = 2 / 3  # in the first step, with less than this times k: search for the k largest
LOST = 1 / 2  # the same in later steps; above 1 / LOST times k, the past is discarded

Entries = tuple[Tensor, Tensor]  # indices (n,) int32, ascending, and magnitudes (n,)


def select_near(track: Track, acc: Tensor, guess: float, k: int) -> Selection:
    """Return all indices at or above the corrected estimate: between k / 2 and ``UPPER * k``.

    One scan of acc. If more than ``UPPER * k`` pass, the k largest of them are kept, without another scan. If fewer
    than k pass, they are sent, and the next estimate is corrected. A second scan, for exactly the k largest, is needed
    only if fewer than k / 2 pass (2k / 3 in a rank's first step), or the estimate is not positive. Zeros are never
    selected.

    Args:
        track: of this rank's factor; changed.
        acc: (numel,) gradient + residual. Not modified. Finite.
        guess: the uncorrected threshold for k on abs(acc); any number, including NaN.
        k: target number of indices on this rank, >= 1.
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
        threshold = float(magnitudes.min())  # host sync: the threshold if too many passed
    return Selection(indices, threshold=threshold)


def strictly_above(x: Tensor, threshold: float) -> Entries:
    """Return the entries of ``x`` (numel,) with abs(x) > threshold, which is rounded to its dtype."""
    cut = torch.tensor(threshold, dtype=x.dtype)
    return kernels.above(x, float(torch.nextafter(cut, torch.full_like(cut, math.inf))))


def above_or_largest(x: Tensor, floor: float | None, fewest: int, most: int) -> Entries:
    """Return all entries at or above the floor if there are at least ``fewest``; otherwise the ``most`` largest."""
    if floor is not None:
        found = kernels.above(x, floor)
        if found[0].numel() >= fewest:
            return found
    return largest_positive(x, most)


def largest_positive(x: Tensor, k: int) -> Entries:
    """Return the k largest, or all that are not zero if there are fewer."""
    indices = kernels.largest(x, k)
    magnitudes = x.index_select(0, indices).abs()
    places = magnitudes.nonzero().view(-1)
    return indices.index_select(0, places), magnitudes.index_select(0, places)


def largest_of(indices: Tensor, magnitudes: Tensor, k: int) -> Entries:
    """Return the k largest of these entries."""
    places = kernels.largest(magnitudes, k)
    return indices.index_select(0, places), magnitudes.index_select(0, places)


def _restart(track: Track, guess: float, found: Entries) -> Selection:
    """Select all found entries, and restart the track with the factor that selects exactly these."""
    track.restart()
    indices, magnitudes = found
    if not indices.numel():
        return Selection(indices)
    cut = float(magnitudes.min())  # host sync: the threshold if the track restarts
    factor = cut / guess if guess > 0 else math.inf
    if 0 < factor < math.inf:
        k = indices.numel()
        track.observe(threshold=factor, count=k, tail=_mean_log_excess(magnitudes, cut), k=k)
    return Selection(indices, threshold=cut)


def _mean_log_excess(magnitudes: Tensor, threshold: float) -> float:
    excess = float(magnitudes.log().mean()) - math.log(threshold)  # host sync: corrects the next guess
    return max(excess, 0.0)
