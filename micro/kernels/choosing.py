"""Compiled loops over lists of indices and magnitudes: the k largest, and what several lists hold together."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from micro.kernels.jit import MAGNITUDE_BITS, array_of, bits_of, jitted, lowest_bit
from micro.kernels.reference import sampled_largest
from micro.kernels.scanning import above

DIGITS = ((20, 11), (10, 10), (0, 10))  # shift and width of a magnitude's bits, highest first: 31 in all
WORD = 64


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
