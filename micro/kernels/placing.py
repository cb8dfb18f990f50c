"""Compiled loops over the entries of a vector at given indices, in a third to a half of the time that torch takes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from micro.kernels.cpu import array_of
from micro.kernels.jit import jitted


@jitted
def _gather(x: Any, indices: Any, found: Any) -> Any:
    for k in range(indices.size):
        i = indices[k]
        if i < 0 or i >= x.size:
            return k
        found[k] = x[i]
    return -1


@jitted
def _add(x: Any, indices: Any, values: Any, before: Any, is_less: Any) -> Any:
    for k in range(indices.size):
        i = indices[k]
        if i < 0 or i >= x.size:
            return k
        if before.size:
            before[k] = x[i]
        x[i] += -values[k] if is_less else values[k]
    return -1


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Return ``x`` (numel,) at ``indices`` (m,). Raises: IndexError."""
    found = torch.empty(indices.numel(), dtype=x.dtype)
    _check(_gather(array_of(x), array_of(indices), array_of(found)), indices, x)
    return found


def add_(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """Add ``values`` (m,) to ``x`` (numel,) at ``indices`` (m,), in their order. Raises: IndexError."""
    _check(_add(array_of(x), array_of(indices), array_of(values), NOTHING, False), indices, x)


def take_(x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Subtract ``values`` (m,) from ``x`` (numel,) at unique ``indices`` (m,); return what was there.

    Raises:
        IndexError: an index outside; what comes before it is subtracted.
    """
    before = torch.empty_like(values)
    _check(_add(array_of(x), array_of(indices), array_of(values), array_of(before), True), indices, x)
    return before


def _check(place: int, indices: Tensor, x: Tensor) -> None:
    if place >= 0:
        raise IndexError(f"index must be in [0, {x.numel()}), got {int(indices[place])}")


NOTHING = np.empty(0, np.float32)
