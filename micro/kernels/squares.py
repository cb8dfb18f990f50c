"""Compiled sums of squares of neighbouring pieces.

Squares are exact in double precision, in which they are added: in lanes that are the same on every processor, then
unit by unit. A unit is what a piece has of a strip, so that the sums do not depend on the number of threads.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from micro.kernels.jit import array_of, jitted
from micro.kernels.threads import in_parts
from micro.kernels.tiles import STRIP

LANES = 32


@jitted
def _sum_of_squares(x: Any, lanes: Any) -> Any:
    """Return the sum of squares of ``x``, a multiple of LANES; ``lanes`` (LANES,) is memory."""
    lanes[:] = 0
    for start in range(0, x.size, LANES):
        part = x[start : start + LANES]
        for i in range(lanes.size):
            lanes[i] += np.float64(part[i]) * np.float64(part[i])
    half = lanes.size // 2
    while half:
        for i in range(half):
            lanes[i] += lanes[half + i]
        half //= 2
    return lanes[0]


@jitted
def _square_units(x: Any, first: Any, edges: Any, number: Any, stop: Any, sums: Any) -> Any:
    """Fill ``sums`` from unit ``number`` on with those of the units that end before ``stop``; return the next unit."""
    lanes = np.empty(LANES)
    while number < sums.size and edges[number + 1] <= stop:
        start, end = edges[number] - first, edges[number + 1] - first
        whole = end - (end - start) % LANES
        total = _sum_of_squares(x[start:whole], lanes)
        for i in range(whole, end):
            total += np.float64(x[i]) * np.float64(x[i])
        sums[number] = total
        number += 1
    return number


@jitted
def _squares(x: Any, first: Any, edges: Any, sums: Any) -> Any:
    """Fill ``sums`` (U,) of the units that lie in ``x``, which begins at ``first`` of the vector."""
    _square_units(x, first, edges, np.searchsorted(edges, first), first + x.size, sums)


@jitted
def _joined(sums: Any, begins: Any) -> Any:
    """Return the sums of pieces (S,), which begin with these units (S + 1,)."""
    joined = np.zeros(begins.size - 1)
    for piece in range(joined.size):
        for number in range(begins[piece], begins[piece + 1]):
            joined[piece] += sums[number]
    return joined


def squares_by_piece(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the sums of squares (S,) float64 of neighbouring pieces of float32 ``x`` (numel,)."""
    values, (edges, begins) = array_of(x), _units(tuple(lengths))
    sums = np.empty(edges.size - 1)
    in_parts(lambda a, b: _squares(values[a:b], a, edges, sums), x.numel(), unit=STRIP)
    return torch.from_numpy(_joined(sums, begins))


@lru_cache(maxsize=64)  # called at every step
def _units(lengths: tuple[int, ...]) -> tuple[Any, Any]:
    """Return where units begin and the last ends (U + 1,), and with which unit each piece begins (S + 1,)."""
    ends = np.array([*accumulate(lengths, initial=0)], np.int64)
    edges = np.union1d(ends, np.arange(0, ends[-1], STRIP, dtype=np.int64))
    return edges, np.searchsorted(edges, ends)
