"""A mean written into a gradient of lower precision: what rounding leaves out of it stays in every rank's residual."""

from collections.abc import Sequence

from torch import Tensor

from micro.sparse import SparseValues, summed


def write_sum_(parts: Sequence[SparseValues], grad: Tensor, *, scale: float) -> SparseValues | None:
    """Write ``scale`` times the sum of ``parts`` into ``grad`` (numel,), which is zero.

    Parts of a higher precision than the gradient's are added up in theirs and rounded once.

    Returns:
        what rounding left out, the same on all ranks; None where parts have the gradient's precision.
    """
    if all(part.values.dtype == grad.dtype for part in parts):
        for part in parts:
            part.add_to_(grad, alpha=scale)
        return None
    total = summed(parts)
    mean = total.values * scale
    rounded = mean.to(grad.dtype)
    grad[total.indices] = rounded
    return SparseValues(total.indices, rounding(mean, rounded))


def write_(mean: Tensor, grad: Tensor) -> Tensor | None:
    """Write ``mean`` (m,) into ``grad`` (m,); return what rounding left out (m,), None where both have one dtype."""
    grad.copy_(mean)
    return None if mean.dtype == grad.dtype else rounding(mean, grad)


def rounding(mean: Tensor, rounded: Tensor) -> Tensor:
    """Return what ``rounded`` lacks of ``mean``; nothing where it overflowed, for such a step is taken back."""
    return (mean - rounded).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
