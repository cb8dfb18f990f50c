"""Compiled coding of which places of a line are set, given how many; `micro.enumeration` says how."""

from typing import Any

import numpy as np

from micro.kernels.jit import jitted

LEAST = np.uint64(1 << 48)
WORD, TOP = np.uint64(16), np.uint64(48)
WHOLE = np.uint64(0xFFFFFFFFFFFFFFFF)


@jitted
def _carry(words: Any, place: Any) -> Any:
    """Add one to the number whose last word is before ``place``."""
    while True:
        place -= 1
        words[place] += np.uint16(1)
        if words[place] != 0:
            return


@jitted
def encode(places: Any, length: Any, words: Any) -> Any:
    """Write ascending ``places`` of a line of ``length`` into zeroed ``words``."""
    low, width = np.uint64(0), WHOLE
    at, done, count = 0, 0, places.size
    for i in range(length):
        rest, left = length - i, count - done
        if left == 0 or left == rest:
            break
        set_width = width // np.uint64(rest) * np.uint64(left)
        if places[done] == i:
            width = set_width
            done += 1
        else:
            before = low
            low += set_width
            width -= set_width
            if low < before:
                _carry(words, at)
        while width < LEAST:
            words[at] = np.uint16(low >> TOP)
            at += 1
            low <<= WORD
            width <<= WORD
    before = low
    low += LEAST - np.uint64(1)
    if low < before:
        _carry(words, at)
    words[at] = np.uint16(low >> TOP)


@jitted
def decode(words: Any, length: Any, places: Any) -> Any:
    """Fill ``places`` with what ``encode`` wrote."""
    value, width = np.uint64(0), WHOLE
    for at in range(4):
        value = (value << WORD) | (np.uint64(words[at]) if at < words.size else np.uint64(0))
    at, done, count = 4, 0, places.size
    for i in range(length):
        rest, left = length - i, count - done
        if left == 0:
            break
        if left == rest:
            for j in range(left):
                places[done + j] = i + j
            break
        set_width = width // np.uint64(rest) * np.uint64(left)
        if value < set_width:
            width = set_width
            places[done] = i
            done += 1
        else:
            value -= set_width
            width -= set_width
        while width < LEAST:
            value = (value << WORD) | (np.uint64(words[at]) if at < words.size else np.uint64(0))
            at += 1
            width <<= WORD
