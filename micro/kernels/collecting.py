"""Compiled loops of a selection among slices that is cut by counts; see `micro.kernels.reference`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from micro.kernels.reference import NUM_BINS
from micro.kernels.jit import bits_of, jitted
from micro.kernels.scanning import scan


def collect(x: Tensor, start: int, lowest: int, shift: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices, magnitudes and counts by bin of what reaches ``lowest``; see micro.kernels."""
    places, bits = scan(bits_of(x), np.array([[0, x.numel()]]), np.array([lowest], np.int32))
    counts = _binned(places, bits, np.int32(start), np.int32(lowest), np.int32(shift))
    return torch.from_numpy(places), torch.from_numpy(bits.view(np.float32)), torch.from_numpy(counts)


@jitted
def _binned(places: Any, bits: Any, start: Any, lowest: Any, shift: Any) -> Any:
    """Add ``start`` to the places, and return (NUM_BINS,) int32 how many candidates each bin has."""
    counts = np.zeros(NUM_BINS, np.int32)
    for i in range(bits.size):
        places[i] += start
        counts[min((bits[i] - lowest) >> shift, NUM_BINS - 1)] += 1
    return counts


def keep(indices: Tensor, magnitudes: Tensor, count: int, bottom: int, top: int, share: int) -> Tensor:
    """Return the indices of what is kept; see micro.kernels."""
    kept = np.empty(count + 1, np.int32)
    _keep(kept, indices.numpy(), bits_of(magnitudes), np.int32(bottom), np.int32(top), np.int64(share))
    return torch.from_numpy(kept[:count])  # an empty array of numpy's has a stride that torch refuses later


@jitted
def _keep(kept: Any, indices: Any, bits: Any, bottom: Any, top: Any, share: Any) -> None:
    """Write what is kept, and behind it one that is not: without a branch, which would be guessed wrong half the time.

    Of those that equal the smallest the first are kept.
    """
    smallest, ties = top - np.int32(1), 0
    if share:
        inside = _between(bits, bottom, top)
        smallest = np.partition(inside, inside.size - share)[inside.size - share]
        ties = share - (inside > smallest).sum()
    count, first = 0, 0
    while ties:
        kept[count] = indices[first]
        count += bits[first] >= smallest
        ties -= bits[first] == smallest
        first += 1
    for i in range(first, bits.size):
        kept[count] = indices[i]
        count += bits[i] > smallest


@jitted
def _between(bits: Any, bottom: Any, top: Any) -> Any:
    found, count = np.empty(bits.size + 1, np.int32), 0
    for i in range(bits.size):
        found[count] = bits[i]
        count += (bits[i] >= bottom) & (bits[i] < top)
    return found[:count]
