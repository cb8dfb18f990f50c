"""The compiled pass of momentum correction: momentum, residual and gradient are read and written once."""

from typing import Any

import numpy as np
from torch import Tensor

from micro.kernels.cpu import array_of, bits_of
from micro.kernels.jit import MAGNITUDE_BITS, jitted
from micro.kernels.threads import in_parts
from micro.kernels.tiles import ORDINARY_BITS, STRIP, TILE, drop_too_large


@jitted
def _add(residual: Any, momentum: Any, grad: Any, factor: Any, is_nesterov: Any) -> Any:
    if is_nesterov:
        for i in range(grad.size):
            momentum[i] = (momentum[i] + grad[i]) * factor
            residual[i] = residual[i] + grad[i] + momentum[i]
    else:
        for i in range(grad.size):
            momentum[i] = momentum[i] * factor + grad[i]
            residual[i] += momentum[i]


@jitted
def _absorb(
    residual: Any,
    residual_bits: Any,
    momentum: Any,
    momentum_bits: Any,
    grad: Any,
    grad_bits: Any,
    factor: Any,
    is_nesterov: Any,
) -> Any:
    first_bad = -1
    for start in range(0, grad.size, STRIP):
        end = min(start + STRIP, grad.size)
        source, codes, bad = grad[start:end], grad_bits[start:end], -1
        highest = np.int32(0)
        for i in range(codes.size):
            highest = max(highest, codes[i] & np.int32(MAGNITUDE_BITS))
        if highest >= ORDINARY_BITS:
            bad = drop_too_large(source, codes, bad)
        _add(residual[start:end], momentum[start:end], source, factor, is_nesterov)
        source[:] = 0
        if highest >= ORDINARY_BITS:
            bad = drop_too_large(momentum[start:end], momentum_bits[start:end], bad)
            bad = drop_too_large(residual[start:end], residual_bits[start:end], bad)
        first_bad = start + bad if first_bad < 0 <= bad else first_bad
    return first_bad


def absorb_(residual: Tensor, momentum: Tensor, grad: Tensor, factor: float, *, is_nesterov: bool) -> int | None:
    """Add contiguous float32 ``grad`` (numel,) to the momentum, that to the residual, and set it to zero.

    Returns:
        the index of the first NaN, Inf or number so large that sums would overflow, which was left out; or None.
    """
    vectors = [each for x in (residual, momentum, grad) for each in (array_of(x), bits_of(x))]

    def absorb(a: int, b: int) -> tuple[int, int]:
        return a + int(_absorb(*(vector[a:b] for vector in vectors), np.float32(factor), is_nesterov)), a

    found = in_parts(absorb, grad.numel(), unit=TILE, moved=24)
    return next((place for place, start in found if place >= start), None)
