"""The end of a reduction: check and write the update, then deliver or drop it together with all other buckets."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from micro.comm.requests import Fill, Once, Reduction, known
from micro.reducers.stats import StepStats
from micro.values.finite import Finite, FirstBad, index_of
from micro.values.flat import Layout
from micro.values.nonfinite import Finding
from micro.values.sparse import Exchanged, SparseValues, summed

Arrived = Callable[[], Tensor]
"""Returns (numel,) bool: at which elements an update holds what was sent, the same on all ranks."""


@dataclass(slots=True)
class Latest:
    """What came of a bucket with its last step.

    Attributes:
        arrived: at which elements something was sent; None: at all of them.
        is_followed: whether all of the bucket's parameters refer to this; see micro.drivers.arrivals.
    """

    arrived: Arrived | None = None
    is_followed: bool = False


def _nothing() -> None:
    """Change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A bucket that was reduced. When all buckets of a step are, each is delivered, or each is dropped.

    The gradient holds the update already; what is kept for the next step has not changed but for the gradient that was
    added to it.

    Attributes:
        stats: of the reduction, as if the step counted.
        grad: (numel,) holds the update.
        arrived: at which elements something was sent; None: at all of them. An optimizer may ask for it.
        findings: where a gradient of any rank, or the update, is not finite: on all ranks as many, none where all is.
        on_deliver: makes what is kept what was not sent.
        on_drop: has parts that follow the update learn that it was zero.
    """

    stats: StepStats
    grad: Tensor
    arrived: Arrived | None = None
    findings: tuple[Finding, ...] = ()
    on_deliver: Callable[[], object] = _nothing
    on_drop: Callable[[], object] = _nothing

    def deliver(self) -> StepStats:
        """Let the step count: what was sent leaves the residual. Return its statistics."""
        self.on_deliver()
        return self.stats

    def drop(self) -> StepStats:
        """Make the update zero; the residual keeps all of the accumulator. Return the statistics of a skipped step."""
        self.grad.zero_()
        self.on_drop()
        return replace(self.stats, skipped=True, global_count=0, relative_error=None)


def arrived_at(indices: Sequence[Tensor], numel: int, device: torch.device) -> Tensor:
    """Return (numel,) bool, True at ``indices``, which are several lists."""
    mask = torch.zeros(numel, dtype=torch.bool, device=device)
    for part in indices:
        mask[part.long()] = True
    return mask


def cut_(acc: Tensor, indices: Tensor | slice, num_summands: int) -> None:
    """Cut ``acc`` (numel,) at ``indices``, where an update overflowed, so that sums of ``num_summands`` do not.

    It cannot be kept whole: with numbers so near to the largest there is, every later step would be left out too.
    """
    limit = torch.finfo(acc.dtype).max / (2 * num_summands)
    acc[indices] = acc[indices].clamp(-limit, limit)


@dataclass(frozen=True, slots=True)
class Checked:
    """What the host knows of a mean.

    Attributes:
        is_finite: whether all gradients were, the same on all ranks.
        overflow: (m,) indices of the mean at which it is not finite although gradients were; None where it is.
        num_updated: distinct entries in the mean.
        records: numbers for the record of the step, None where there is none.
    """

    is_finite: bool
    overflow: Tensor | None
    num_updated: int
    records: list[Any]

    @property
    def bad_update(self) -> int | None:
        """The first of the indices at which the mean overflowed."""
        return None if self.overflow is None else int(self.overflow.min())

    def findings(self, layout: Layout, first_bad: FirstBad) -> tuple[Finding, ...]:
        """Return what was not finite; ``first_bad`` is where this rank's first bad sum is."""
        if self.is_finite and self.overflow is None:
            return ()
        return (Finding(layout, index_of(first_bad, layout.numel), self.bad_update),)


def checked(
    mean: Tensor,
    *records: Tensor | None,
    is_finite: Finite,
    num_updated: int | Tensor,
    fits: Finite | None = None,
    last: bool = True,
) -> Reduction[Checked]:
    """Return what is to be known of a ``mean`` (numel,); an accelerator is read once.

    Args:
        records: numbers () for the record of the step.
        is_finite: whether all ranks' gradients were finite; where the host knows that they were not, there is no mean.
        num_updated: see Checked.
        fits: whether the sum of the mean is finite, where that is known.
        last: whether the reduction ends with it.
    """
    total: float | Tensor = 0.0
    if fits is None and is_finite is not False:
        total = mean.sum(dtype=torch.promote_types(mean.dtype, torch.float32))
    numbers = yield from known(is_finite, fits is None or fits, total, num_updated, *records, last=last)
    return _checked(numbers, lambda: torch.nonzero(~torch.isfinite(mean)).view(-1))


def checked_sum(sent: Exchanged, scale: float, *records: Tensor | None) -> Reduction[Checked]:
    """Return what is to be known of ``scale`` times an exchange's update, as `checked` does; each part has to fit.

    A sum of values is NaN or Inf when any of them is. It can also overflow itself, so the values decide in the end.
    """
    scaled, total = yield Once(work=partial(_scaled, sent.update, scale))
    numbers = yield from known(sent.is_finite, True, total, sent.num_updated, *records, last=True)
    pairs = zip(sent.update, scaled, strict=True)
    return _checked(numbers, lambda: torch.cat([part.indices[~torch.isfinite(values)] for part, values in pairs]))


def _checked(numbers: Sequence[Any], overflown: Callable[[], Tensor]) -> Checked:
    were_finite, fits, total, num_updated, *records = numbers
    overflow = overflown() if were_finite and not (fits and math.isfinite(total)) else None
    overflow = overflow if overflow is not None and overflow.numel() else None
    return Checked(bool(were_finite), overflow, int(num_updated or 0), records)


def _scaled(parts: Sequence[SparseValues], scale: float) -> tuple[list[Tensor], Tensor]:
    """Return ``scale`` times the values of each part, and the sum () of all of them."""
    scaled = [part.values if scale == 1 else part.values * scale for part in parts]
    if len(scaled) == 1:
        return scaled, scaled[0].sum()
    return scaled, torch.stack([values.sum() for values in scaled]).sum()


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
