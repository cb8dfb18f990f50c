"""A reduction that can still be taken back, and the decision that all buckets of a step share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from micro.comm import Comm
from micro.feedback import Undo, nothing_to_undo
from micro.nonfinite import Finding, NonFiniteGradient, Policy, report
from micro.stats import StepStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A bucket that was reduced. Whether the step counts is decided when all of its buckets are.

    Attributes:
        stats: of the reduction, as if the step counted.
        grad: (numel,) holds the update.
        findings: where a gradient of any rank, or the update, is not finite: on all ranks as many, none where all is.
        undo: puts back what was sent: the state is then as if the exchange had sent nothing.
    """

    stats: StepStats
    grad: Tensor
    findings: tuple[Finding, ...] = ()
    undo: Undo = nothing_to_undo

    def take_back(self) -> StepStats:
        """Make the update zero, put back what was sent, and return the statistics of a step that was skipped."""
        self.undo()
        self.grad.zero_()
        return replace(self.stats, skipped=True, global_count=0, relative_error=None)


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of a step: the statistics of its buckets, and the error to raise, if any, the same on all ranks."""

    stats: tuple[StepStats, ...]
    error: NonFiniteGradient | None = None


def cut_(acc: Tensor, indices: Tensor | slice, num_summands: int) -> None:
    """Cut ``acc`` (numel,) at ``indices``, where an update overflowed, so that sums of ``num_summands`` do not.

    It cannot be kept whole: with numbers so near to the largest there is, every later step would be left out too.
    """
    limit = torch.finfo(acc.dtype).max / (2 * num_summands)
    acc[indices] = acc[indices].clamp(-limit, limit)


def decide(attempts: Sequence[Attempt], policy: Policy, comm: Comm) -> Decision:
    """Let the step of all buckets count, or of none: one bucket that is not finite takes all of them back.

    Whether a bucket is finite travelled with its own exchange, so that all ranks know it of all buckets and decide
    alike without a collective. Only an error costs one, which gathers where each rank's first NaN or Inf is.

    Args:
        attempts: the buckets of one step, in the same order on all ranks.
    """
    findings = [finding for attempt in attempts for finding in attempt.findings]
    if not findings:
        return Decision(tuple(attempt.stats for attempt in attempts))
    stats = tuple(attempt.take_back() for attempt in attempts)
    if policy == "skip":
        return Decision(stats)
    return Decision(stats, report(findings, stats[0].step, comm, attempts[0].grad.device))
