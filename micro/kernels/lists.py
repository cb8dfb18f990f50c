"""Compiled loops over lists of entries on a CPU: the k largest, values at indices, sums of several lists.

Lists with ascending indices are merged in one pass, without sort or search. Values at indices take a third to a half of
torch's time.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from micro.kernels import reference
from micro.kernels.cpu import above, array_of, bits_of
from micro.kernels.jit import MAGNITUDE_BITS, jitted, lowest_bit
from micro.kernels.sampling import sampled_largest
from micro.kernels.threads import are_few_entries, entries_in_parts

DIGITS = ((20, 11), (10, 10), (0, 10))  # shift and width of a magnitude's bits, highest first: 31 in all
WORD = 64
MOST_MERGED = 64  # lists that are merged one after the other


@jitted
def _kth(bits: Any, k: Any) -> Any:
    """Return the k-th largest magnitude, as bits, and how many are larger; a digit of all that may be it at a time."""
    left, above, found = bits & np.int32(MAGNITUDE_BITS), 0, np.int32(0)
    for shift, width in DIGITS:
        counts = np.zeros((2, 1 << width), np.int32)  # two tables: equal neighbours need not wait for each other
        mask = np.int32((1 << width) - 1)
        for i in range(left.size):
            counts[i & 1, (left[i] >> np.int32(shift)) & mask] += 1
        digit = (1 << width) - 1
        while above + counts[0, digit] + counts[1, digit] < k:
            above += counts[0, digit] + counts[1, digit]
            digit -= 1
        found |= np.int32(digit << shift)
        num_equal = 0
        for i in range(left.size):
            magnitude = left[i]
            left[num_equal] = magnitude
            num_equal += (magnitude >> np.int32(shift)) & mask == digit
        left = left[:num_equal]
    return found, above


@jitted
def _largest(bits: Any, k: Any) -> Any:
    kth, num_above = _kth(bits, k)
    room = k - num_above  # for ties
    indices = np.empty(k + 1, np.int32)
    count = 0
    for i in range(bits.size):
        magnitude = bits[i] & np.int32(MAGNITUDE_BITS)
        tied = (magnitude == kth) & (room > 0)
        indices[count] = i
        count += (magnitude > kth) | tied
        room -= tied
    return indices[:k]


def largest(x: Tensor, k: int) -> Tensor:
    """Return the ascending (k,) int32 indices of the k largest of contiguous float32 ``x``; see micro.kernels."""
    return sampled_largest(x, k, above, _of_few)


def _of_few(x: Tensor, k: int) -> Tensor:
    """Do the same in about six reads of ``x``."""
    return torch.from_numpy(_largest(bits_of(x), k))


@jitted
def _first_distinct(indices: Any, numel: Any, k: Any) -> Any:
    words = np.zeros(numel // WORD + 1, np.uint64)
    count = 0
    for i in range(indices.size):
        place = indices[i] >> 6
        word: Any = words[place]
        marked = word | np.uint64(1) << np.uint64(indices[i] & 63)
        count += marked != word
        if count > k:
            break
        words[place] = marked
    ascending = np.empty(min(count, k) + 2, indices.dtype)
    count = 0
    for number in range(words.size):
        word = words[number]
        for _ in range(2):  # without a branch, which no processor could predict: most words have none to two
            ascending[count] = number * WORD + lowest_bit(word)
            count += word != np.uint64(0)
            word &= word - np.uint64(1)
        while word:
            ascending[count] = number * WORD + lowest_bit(word)
            count += 1
            word &= word - np.uint64(1)
    return ascending[:count]


def first_distinct(indices: Tensor, numel: int, k: int) -> Tensor:
    """Return, ascending, the first k that differ of ``indices`` (m,), all in [0, numel): a bit for each place."""
    return torch.from_numpy(_first_distinct(array_of(indices), numel, k))


def are_lists(*indices: Tensor) -> bool:
    """Tell whether loops can read these lists of indices."""
    return all(part.is_cpu and part.dtype is torch.int32 and part.is_contiguous() for part in indices)


def added(indices: Tensor, values: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the union of lists of indices, and the sums of their values; see micro.kernels."""
    if len(counts) <= MOST_MERGED and are_lists(indices):
        merged = _added(array_of(indices), array_of(values), np.cumsum(counts))
        if merged is not None:
            return torch.from_numpy(merged[0]), torch.from_numpy(merged[1])
    return reference.added(indices, values, counts)


@jitted
def _added(indices: Any, values: Any, ends: Any) -> Any:
    """Return indices and sums; None where a list does not ascend."""
    places, sums = indices[: ends[0]], values[: ends[0]] + np.float32(0)  # a sum that begins with zero is never -0
    if not ascends(places):
        return None
    for i in range(1, ends.size):
        start, stop = ends[i - 1], ends[i]
        if not ascends(indices[start:stop]):
            return None
        places, sums = _merged(places, sums, indices[start:stop], values[start:stop])
    return places, sums


def common(indices: Tensor, values: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries whose indices are in ``among`` too; see micro.kernels."""
    if are_lists(indices, among):
        own, others = array_of(indices), array_of(among)
        if ascends(own) and ascends(others):
            places, kept = _common(own, array_of(values), others)
            return torch.from_numpy(places), torch.from_numpy(kept)
    return reference.common(indices, values, among)


@jitted
def _common(indices: Any, values: Any, among: Any) -> Any:
    places, kept = np.empty(indices.size + 1, np.int32), np.empty(indices.size + 1, np.float32)
    j, count = 0, 0
    for i in range(indices.size):
        while j < among.size and among[j] < indices[i]:
            j += 1
        if j < among.size and among[j] == indices[i]:
            places[count], kept[count] = indices[i], values[i]
            count += 1
    return places[:count], kept[:count]


@jitted
def ascends(indices: Any) -> Any:
    """Tell whether each index is larger than the one before it."""
    num_falling = 0
    for i in range(1, indices.size):
        num_falling += indices[i] <= indices[i - 1]
    return num_falling == 0


@jitted
def _merged(first: Any, first_values: Any, second: Any, second_values: Any) -> Any:
    most = first.size + second.size
    places, sums = np.empty(most + 1, np.int32), np.empty(most + 1, np.float32)
    i, j, count = 0, 0, 0
    while i < first.size and j < second.size:
        here, there = first[i], second[j]
        places[count] = min(here, there)
        value = np.float32(0)
        if here <= there:
            value = first_values[i]
            i += 1
        if there <= here:
            value += second_values[j]
            j += 1
        sums[count] = value
        count += 1
    while i < first.size:
        places[count], sums[count] = first[i], first_values[i]
        i, count = i + 1, count + 1
    while j < second.size:
        places[count], sums[count] = second[j], second_values[j] + np.float32(0)
        j, count = j + 1, count + 1
    return places[:count], sums[:count]


def _fits(indices: Tensor, *values: Tensor) -> bool:
    """Tell whether a loop serves, which needs an int32 index for each value."""
    return are_lists(indices) and all(each.numel() == indices.numel() for each in values)


@jitted
def _gather(x: Any, indices: Any, found: Any) -> Any:
    for k in range(indices.size):
        i = indices[k]
        if i < 0 or i >= x.size:
            return k
        found[k] = x[i]
    return -1


@jitted
def _add(x: Any, indices: Any, values: Any, is_less: Any) -> Any:
    for k in range(indices.size):
        i = indices[k]
        if i < 0 or i >= x.size:
            return k
        x[i] += -values[k] if is_less else values[k]
    return -1


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Return ``x`` (numel,) at ``indices`` (m,). Raises: IndexError."""
    if not _fits(indices):
        return x.index_select(0, indices)
    found = torch.empty(indices.numel(), dtype=x.dtype)
    vector, places, target = array_of(x), array_of(indices), array_of(found)
    bad = entries_in_parts(lambda a, b: (a, _gather(vector, places[a:b], target[a:b])), places.size)
    _check(bad, indices, x)
    return found


def add_at_(x: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0) -> None:
    """Add ``alpha`` times ``values`` (m,) to ``x`` (numel,) at ``indices`` (m,), in their order.

    Raises:
        IndexError: an index outside; some of the others were added to then.
    """
    if abs(alpha) != 1 or not _fits(indices, values):
        x.index_add_(0, indices, values, alpha=alpha)
        return
    vector, places, source = array_of(x), array_of(indices), array_of(values)

    def add(a: int, b: int) -> tuple[int, int]:
        return a, _add(vector, places[a:b], source[a:b], alpha < 0)

    is_apart = are_few_entries(places.size) or ascends(places)  # parts of other lists may share an index
    _check(entries_in_parts(add, places.size) if is_apart else [add(0, places.size)], indices, x)


def _check(bad: list[tuple[int, int]], indices: Tensor, x: Tensor) -> None:
    """Raise IndexError where any part, given by its start and the place in it, found an index outside."""
    for start, place in bad:
        if place >= 0:
            raise IndexError(f"index must be in [0, {x.numel()}), got {int(indices[start + place])}")
