"""Lists of entries at ascending indices, merged by one walk along both: no sort and no search."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from micro.kernels import reference
from micro.kernels.jit import array_of, jitted

MOST_MERGED = 64  # lists that are merged one after the other


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
