"""The compiled choice of the largest magnitudes of each of many short pieces: a piece is read once, then stays near.

The k-th largest of a piece's lanes' highest magnitudes bounds the k-th largest of the piece from below, for that many
elements reach it, and few more do: the exact choice is made among those.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from micro.kernels.jit import INFINITY_BITS, MAGNITUDE_BITS, bits_of, jitted, lowest_bit
from micro.kernels.scanning import LANES, passing
from micro.kernels.threads import in_parts

SPREAD = 4  # lanes for each element that is chosen: two of these seldom share a lane
NEAR = 1 << 16  # of bit patterns, one in a hundred: a bound that is off by that lets hardly more pass


@jitted
def _floor_of(magnitudes: Any, count: Any, tolerance: Any) -> Any:
    """Return a bit pattern that at least ``count`` of ``magnitudes`` reach, and how many do.

    The highest there is, but for a ``tolerance`` of bit patterns; 0 where fewer than ``count`` reach that. Patterns
    below 0 count for nothing.
    """
    low: Any = np.int32(0)
    high: Any = np.int32(INFINITY_BITS + 1)
    reached = -1
    while high - low > tolerance and reached != count:
        middle: Any = np.int32(low + ((high - low) >> np.int32(1)))
        found: Any = np.int32(0)
        for i in range(magnitudes.size):
            found += np.int32(magnitudes[i] >= middle)
        if found >= count:
            low, reached = middle, found
        else:
            high = middle
    return low


@jitted
def _highest_by_lane(bits: Any, highest: Any) -> Any:
    """Make ``highest`` (lanes,) the largest magnitude of every ``lanes``-th of the bits; NaN counts as -1."""
    lanes = highest.size
    highest[:] = np.int32(-1)
    for first in range(0, bits.size, lanes):
        row = bits[first : first + lanes]
        for i in range(row.size):
            magnitude = row[i] & np.int32(MAGNITUDE_BITS)
            magnitude = magnitude if magnitude <= np.int32(INFINITY_BITS) else np.int32(-1)
            highest[i] = max(highest[i], magnitude)


@jitted
def _candidates(bits: Any, lowest: Any, places: Any, magnitudes: Any) -> Any:
    """Write places and magnitudes of all that reach ``lowest``; return how many there are."""
    count, whole = 0, bits.size - bits.size % LANES
    for start in range(0, whole, LANES):
        word: Any = passing(bits, start, lowest)  # type: ignore[call-arg]
        while word:
            i = start + lowest_bit(word)
            places[count], magnitudes[count] = i, bits[i] & MAGNITUDE_BITS
            count += 1
            word &= word - np.uint64(1)
    for i in range(whole, bits.size):
        magnitude = bits[i] & MAGNITUDE_BITS
        if lowest <= magnitude <= INFINITY_BITS:
            places[count], magnitudes[count] = i, magnitude
            count += 1
    return count


@jitted
def _keep(places: Any, magnitudes: Any, count: Any, offset: Any, chosen: Any) -> Any:
    """Write the places of the ``count`` largest, ties to the first; return how many were written."""
    if magnitudes.size <= count:
        for i in range(magnitudes.size):
            chosen[i] = offset + places[i]
        return magnitudes.size
    cut, room = _floor_of(magnitudes, count, 1), count
    for i in range(magnitudes.size):
        room -= magnitudes[i] > cut
    kept = 0
    for i in range(magnitudes.size):
        is_tied = magnitudes[i] == cut
        if magnitudes[i] > cut or (is_tied and room > 0):
            chosen[kept] = offset + places[i]
            kept += 1
            room -= is_tied
    return kept


@jitted
def _choose(bits: Any, spans: Any, counts: Any, room: Any, chosen: Any) -> Any:
    """Write the places of the ``counts`` largest of each span into ``chosen``; return how many were written."""
    places, magnitudes, highest = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32)
    kept = 0
    for number in range(counts.size):
        start, stop, count = spans[number, 0], spans[number, 1], counts[number]
        if not count:
            continue
        piece = bits[start:stop]
        lanes = min(max(LANES, SPREAD * count), piece.size)
        _highest_by_lane(piece, highest[:lanes])
        floor = _floor_of(highest[:lanes], count, NEAR)
        found = _candidates(piece, floor, places, magnitudes)
        kept += _keep(places[:found], magnitudes[:found], count, np.int32(start), chosen[kept:])
    return kept


def largest_of_each(x: Tensor, spans: Tensor, counts: Tensor) -> Tensor:
    """Return the ascending int32 indices of the ``counts`` largest magnitudes of each piece of ``x``.

    Ties go to the lowest index; NaN is never chosen.

    Args:
        x: (numel,) contiguous float32.
        spans: (S, 2) int64 starts and stops, ascending, not overlapping.
        counts: (S,) int64, none more than the piece has.
    """
    bits, edges, wanted = bits_of(x), spans.numpy(), counts.numpy()
    lengths = edges[:, 1] - edges[:, 0]
    ends, before = lengths.cumsum(), np.concatenate([[0], wanted.cumsum()])
    room = int(lengths.max(initial=0)) + 1
    chosen = np.empty(int(before[-1]) + 1, np.int32)

    def choose(start: int, stop: int) -> Any:
        first, last = np.searchsorted(ends, [start, stop], side="right")
        own = chosen[before[first] : before[last]]
        return own[: _choose(bits, edges[first:last], wanted[first:last], room, own)]

    parts = in_parts(choose, int(lengths.sum()))
    whole = sum(part.size for part in parts) == before[-1]
    return torch.from_numpy(chosen[: before[-1]] if whole else np.concatenate(parts))
