"""A mean written into a gradient of lower precision: what rounding leaves out of it stays in every rank's residual."""

from collections.abc import Sequence

import torch
from torch import Tensor

from micro.comm.requests import Fill, Reduction
from micro.values.sparse import SparseValues, summed


def write_sum_(parts: Sequence[SparseValues], grad: Tensor, *, scale: float) -> Reduction[SparseValues | None]:
    """Write ``scale`` times the sum of ``parts`` into ``grad`` (numel,), which is zero.

    Parts of a higher precision than the gradient's are added up in theirs and rounded once. What is beyond the largest
    number of the gradient's dtype waits in the residual too: float16 ends at 65,504.

    Args:
        parts: the same on all ranks, as ``scale`` is.
    Returns:
        what rounding left out, the same on all ranks; None where parts have the gradient's precision.
    """
    if len(parts) == 1:  # one part is written as fast as a copy of what another rank has written
        return _write_sum_(parts, grad, scale)
    unsent: SparseValues | None = yield Fill(into=grad, work=lambda: _write_sum_(parts, grad, scale))
    return unsent


def _write_sum_(parts: Sequence[SparseValues], grad: Tensor, scale: float) -> SparseValues | None:
    if all(part.values.dtype == grad.dtype for part in parts):
        for part in parts:
            part.add_to_(grad, alpha=scale)
        return None
    total = summed(parts)
    mean = total.values * scale
    lower = rounded(mean, grad.dtype)
    grad[total.indices] = lower
    return SparseValues(total.indices, rounding(mean, lower))


def write_(mean: Tensor, grad: Tensor) -> Tensor | None:
    """Write ``mean`` (m,) into ``grad`` (m,); return what rounding left out (m,), None where both have one dtype."""
    if mean.dtype == grad.dtype:
        grad.copy_(mean)
        return None
    grad.copy_(rounded(mean, grad.dtype))
    return rounding(mean, grad)


def rounded(mean: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``mean`` in a lower precision, cut at the largest number that this has; the rest waits."""
    largest = torch.finfo(dtype).max
    return mean.to(dtype).clamp_(-largest, largest)


def rounding(mean: Tensor, lower: Tensor) -> Tensor:
    """Return what ``lower`` lacks of ``mean``; nothing where that is not finite, for such a step is taken back."""
    return (mean - lower).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
