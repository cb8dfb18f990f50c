"""What a reduction returns: an update to be delivered or dropped; all buckets of a step share that decision."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from micro.comm.requests import Reduction, known
from micro.kernels.reference import first_nonfinite
from micro.reducers.stats import StepStats
from micro.values.finite import Finite, FirstBad, index_of, is_number
from micro.values.flat import Layout
from micro.values.nonfinite import Finding, Policy, report

Arrived = Callable[[], Tensor]
"""Returns (numel,) bool: at which elements an update holds what was sent, the same on all ranks."""


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


def decide(outcomes: Sequence[Outcome], policy: Policy) -> Reduction[tuple[StepStats, ...]]:
    """Deliver all buckets of a step, or drop all of them where one is not finite; return their statistics.

    Whether a bucket is finite travelled with its own exchange, so that all ranks know it of all buckets and decide
    alike without a collective. Only an error costs one, which gathers where each rank's first NaN or Inf is.

    Args:
        outcomes: the buckets of one step, in the same order on all ranks.

    Raises:
        NonFiniteGradient: the step was dropped, and the policy is to stop.
    """
    findings = [finding for outcome in outcomes for finding in outcome.findings]
    stats = tuple(outcome.drop() if findings else outcome.deliver() for outcome in outcomes)
    if findings and policy == "stop":
        raise (yield from report(findings, stats[0].step, outcomes[0].grad.device))
    return stats


def cut_(acc: Tensor, indices: Tensor | slice, num_summands: int) -> None:
    """Cut ``acc`` (numel,) at ``indices``, where an update overflowed, so that sums of ``num_summands`` do not.

    It cannot be kept whole: with numbers so near to the largest there is, every later step would be left out too.
    """
    limit = torch.finfo(acc.dtype).max / (2 * num_summands)
    acc[indices] = acc[indices].clamp(-limit, limit)


@dataclass(frozen=True, slots=True)
class Checked:
    """What the host knows of a mean that was written.

    Attributes:
        is_finite: whether all gradients were, the same on all ranks.
        bad_update: index of the first element of the mean that is not finite, where gradients were.
        num_updated: distinct entries in the mean.
        records: numbers for the record of the step, None where there is none.
    """

    is_finite: bool
    bad_update: int | None
    num_updated: int
    records: list[Any]

    def findings(self, layout: Layout, first_bad: FirstBad) -> tuple[Finding, ...]:
        """Return what was not finite; ``first_bad`` is where this rank's first bad sum is."""
        if self.is_finite and self.bad_update is None:
            return ()
        return (Finding(layout, index_of(first_bad, layout.numel), self.bad_update),)


def checked(
    grad: Tensor, *records: Tensor | None, is_finite: Finite, num_updated: int | Tensor, last: bool = True
) -> Reduction[Checked]:
    """Return what is to be known of the mean in ``grad`` (numel,); an accelerator is read once.

    Args:
        records: numbers () for the record of the step.
        is_finite: whether all ranks' gradients were finite; where the host knows that they were not, there is no mean.
        num_updated: see Checked.
        last: whether the reduction ends with it.
    """
    fits = is_finite is False or is_number(grad.sum(dtype=torch.promote_types(grad.dtype, torch.float32)))
    were_finite, is_sum_finite, number, *numbers = yield from known(is_finite, fits, num_updated, *records, last=last)
    bad_update = None if is_sum_finite or not were_finite else first_nonfinite(grad)
    return Checked(bool(were_finite), bad_update, int(number or 0), numbers)
