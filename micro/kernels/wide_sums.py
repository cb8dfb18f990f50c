"""Compiled sums of float32 vectors in double precision, one vector after the other."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from micro.kernels.cpu import array_of
from micro.kernels.jit import jitted

AT_ONCE = 4  # vectors in a pass over the sum: more of them save nothing


@jitted
def _add_four(total: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    for i in range(total.size):
        total[i] = (((total[i] + a[i]) + b[i]) + c[i]) + d[i]


@jitted
def _add(total: Any, vector: Any) -> None:
    for i in range(total.size):
        total[i] += vector[i]


def add_up_(total: Tensor, vectors: Sequence[Tensor]) -> None:
    """Add contiguous float32 ``vectors`` (numel,) to double-precision ``total`` (numel,), in their order."""
    target, sources = array_of(total), [array_of(vector) for vector in vectors]
    whole = len(sources) - len(sources) % AT_ONCE
    for first in range(0, whole, AT_ONCE):
        _add_four(target, *sources[first : first + AT_ONCE])
    for source in sources[whole:]:
        _add(target, source)
