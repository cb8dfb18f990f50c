"""Compiled random bits; `micro.randomness` says which, in torch, and has the same."""

from typing import Any

import numpy as np

from micro.kernels.jit import jitted


@jitted
def noise(first: Any, second: Any, place: Any) -> Any:
    """Return the 32 random bits of ``place`` as uint32."""
    word = np.uint32(np.uint32(place) ^ first)
    word = np.uint32(np.uint32(word ^ (word >> np.uint32(16))) * np.uint32(0x7FEB352D))
    word = np.uint32(np.uint32(word ^ (word >> np.uint32(15))) ^ second)
    word = np.uint32(word * np.uint32(0x846CA68B))
    return np.uint32(word ^ (word >> np.uint32(16)))


@jitted
def uniform(first: Any, second: Any, place: Any) -> Any:
    """Return the random multiple of 2^-24 in [0, 1) of ``place``, float32."""
    return np.float32(np.int32(noise(first, second, place) >> np.uint32(8))) * np.float32(2.0**-24)
