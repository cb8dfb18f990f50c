"""Scans whose result lengths the host reads together with those of other reductions."""

from torch import Tensor

from micro import kernels
from micro.comm.requests import Reduction, known
from micro.kernels import forms, reference
from micro.kernels.magnitudes import reaching
from micro.kernels.sampling import magnitude_near


def above(x: Tensor, threshold: float | Tensor) -> Reduction[tuple[Tensor, Tensor]]:
    """Return `micro.kernels.above`."""
    if x.is_cpu:
        return kernels.above(x, float(threshold))
    count, lists = forms(x).counted_above(x, threshold)
    (length,) = yield from known(count)
    found: tuple[Tensor, Tensor] = lists(length)
    return found


def largest(x: Tensor, k: int) -> Reduction[Tensor]:
    """Return `micro.kernels.largest`."""
    guess = None if x.is_cpu else magnitude_near(x, k)
    if guess is not None:
        candidates, magnitudes = yield from above(x, guess)
        if candidates.numel() >= k:
            return candidates.index_select(0, reference.largest(magnitudes, k))
    return kernels.largest(x, k)


def collect(x: Tensor, start: int, lowest: int, shift: int) -> Reduction[tuple[Tensor, Tensor, Tensor]]:
    """Return `micro.kernels.collect`."""
    if x.is_cpu:
        return kernels.collect(x, start, lowest, shift)
    found = yield from above(x, reaching(lowest, x.dtype))
    return reference.collect(x, start, lowest, shift, found)
