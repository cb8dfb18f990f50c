"""The gradient is added to the residual and set to zero in one compiled pass."""

import numpy as np
from torch import Tensor

from micro.kernels.jit import array_of
from micro.kernels.threads import in_parts
from micro.kernels.tiles import TILE, absorb_and_clear


def absorb_(residual: Tensor, grad: Tensor) -> int | None:
    """Add contiguous float32 ``grad`` (numel,) to ``residual`` and set it to zero; see micro.kernels."""
    target, source = array_of(residual), array_of(grad)
    vectors = target, target.view(np.int32), source, source.view(np.int32)

    def absorb(a: int, b: int) -> tuple[int, int]:
        return a + int(absorb_and_clear(*(vector[a:b] for vector in vectors))), a

    found = in_parts(absorb, grad.numel(), unit=TILE, moved=16)
    return next((place for place, start in found if place >= start), None)
