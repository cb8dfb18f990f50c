"""What a scan finds, of which an accelerator's host reads the length in turn with what other reductions read."""

from torch import Tensor

from micro import kernels
from micro.kernels import cuts
from micro.kernels.table import forms
from micro.requests import Reduction, known


def above(x: Tensor, threshold: float) -> Reduction[tuple[Tensor, Tensor]]:
    """Return what `micro.kernels.above` does."""
    if x.is_cpu:
        return kernels.above(x, threshold)
    count, lists = forms(x).scanning.counted_above(x, threshold)
    (length,) = yield from known(count)
    found: tuple[Tensor, Tensor] = lists(length)
    return found


def collect(x: Tensor, start: int, lowest: int, shift: int) -> Reduction[tuple[Tensor, Tensor, Tensor]]:
    """Return what `micro.kernels.collect` does."""
    if x.is_cpu:
        return kernels.collect(x, start, lowest, shift)
    found = yield from above(x, cuts.reaching(lowest, x.dtype))
    return cuts.counted(found, start, lowest, shift)
