"""The gradient is added to what was kept and set to zero in one pass: to a residual, or to momentum first."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from micro.kernels.floats import of_bfloat16, of_half
from micro.kernels.jit import MAGNITUDE_BITS, array_of, bits_of, jitted
from micro.kernels.threads import in_parts
from micro.kernels.tiles import ORDINARY_BITS, STRIP, TILE, absorb_and_clear, absorb_tile, drop_too_large


def absorb_(residual: Tensor, grad: Tensor) -> int | None:
    """Add contiguous ``grad`` (numel,), of 32 or 16 bits, to float32 ``residual`` and set it to zero."""
    target, is_half = array_of(residual), grad.dtype is torch.float16
    bits = target.view(np.int32)
    if grad.dtype is torch.float32:
        source = array_of(grad)
        source_bits = source.view(np.int32)

        def absorb(a: int, b: int) -> tuple[int, int]:
            return a + int(absorb_and_clear(target[a:b], bits[a:b], source[a:b], source_bits[a:b])), a
    else:
        codes = grad.detach().view(torch.uint16).numpy()

        def absorb(a: int, b: int) -> tuple[int, int]:
            return a + int(_absorb_narrow(target[a:b], bits[a:b], codes[a:b], is_half)), a

    found = in_parts(absorb, grad.numel(), unit=TILE, moved=8 + 2 * grad.element_size())
    return next((place for place, start in found if place >= start), None)


@jitted
def _absorb_narrow(residual: Any, residual_bits: Any, grad: Any, is_half: Any) -> Any:
    first_bad = -1
    source = np.empty(STRIP, np.float32)
    source_bits = source.view(np.int32)
    for start in range(0, grad.size, STRIP):
        end = min(start + STRIP, grad.size)
        codes, size = grad[start:end], end - start
        if is_half:
            for i in range(size):
                source[i] = of_half(np.int32(codes[i]))
        else:
            for i in range(size):
                source[i] = of_bfloat16(np.int32(codes[i]))
        bad = absorb_tile(residual[start:end], residual_bits[start:end], source[:size], source_bits[:size])
        codes[:] = 0
        first_bad = start + bad if first_bad < 0 <= bad else first_bad
    return first_bad


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
def _absorb_with_momentum(
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


def absorb_with_momentum_(
    residual: Tensor, momentum: Tensor, grad: Tensor, factor: float, is_nesterov: bool
) -> int | None:
    """Add contiguous float32 ``grad`` (numel,) to the momentum, that to the residual, and set it to zero.

    Returns:
        the index of the first NaN, Inf or number so large that sums would overflow, which was left out; or None.
    """
    vectors = [each for x in (residual, momentum, grad) for each in (array_of(x), bits_of(x))]

    def absorb(a: int, b: int) -> tuple[int, int]:
        return a + int(_absorb_with_momentum(*(vector[a:b] for vector in vectors), np.float32(factor), is_nesterov)), a

    found = in_parts(absorb, grad.numel(), unit=TILE, moved=24)
    return next((place for place, start in found if place >= start), None)
