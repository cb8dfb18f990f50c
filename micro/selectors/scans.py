"""What a scan finds, of which an accelerator's host reads the length in turn with what other reductions read."""

from torch import Tensor

from micro import kernels
from micro.comm.requests import Reduction, known
from micro.kernels import reference
from micro.kernels.table import forms


def above(x: Tensor, threshold: float | Tensor) -> Reduction[tuple[Tensor, Tensor]]:
    """Return what `micro.kernels.above` does."""
    if x.is_cpu:
        return kernels.above(x, float(threshold))
    count, lists = forms(x).counted_above(x, threshold)
    (length,) = yield from known(count)
    found: tuple[Tensor, Tensor] = lists(length)
    return found


def largest(x: Tensor, k: int) -> Reduction[Tensor]:
    """Return what `micro.kernels.largest` does."""
    guess = None if x.is_cpu else reference.magnitude_near(x, k)
    if guess is not None:
        candidates, magnitudes = yield from above(x, guess)
        if candidates.numel() >= k:
            return candidates.index_select(0, reference.largest(magnitudes, k))
    return kernels.largest(x, k)


def collect(x: Tensor, start: int, lowest: int, shift: int) -> Reduction[tuple[Tensor, Tensor, Tensor]]:
    """Return what `micro.kernels.collect` does."""
    if x.is_cpu:
        return kernels.collect(x, start, lowest, shift)
    found = yield from above(x, reference.reaching(lowest, x.dtype))
    return reference.collect(x, start, lowest, shift, found)
