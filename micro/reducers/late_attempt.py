"""A reduction of which the host does not know yet whether all gradients were finite: the device does."""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from micro.comm import Comm
from micro.flat import Layout
from micro.late import Late
from micro.late_stats import LateStats
from micro.nonfinite import Finding, Policy, report
from micro.reducers.attempt import Attempt, Decision
from micro.stats import StepStats


@dataclass(frozen=True, slots=True)
class LateFindings:
    """What the host learns of a step when it has arrived.

    Attributes:
        layout: of the vector.
        step: its number.
        late: whether the step was bad, this rank's first bad index, the vector's length where there is none, the same
            of the update where that is known, and maybe more.
    """

    layout: Layout
    step: int
    late: Late

    def findings(self) -> tuple[Finding, ...]:
        """Return what was not finite; the host waits for it."""
        is_bad, *places = self.late.read()
        if not is_bad:
            return ()
        return (Finding(self.layout, *(int(at) if at < self.layout.numel else None for at in places[:2])),)


def raise_late_findings(late_findings: LateFindings | None, comm: Comm, device: torch.device) -> None:
    """Raise NonFiniteGradient, on all ranks, where the last step was bad and had to stop: the host did not wait then.

    Args:
        late_findings: of that step, where it had to stop if it was bad.
    """
    findings = () if late_findings is None else late_findings.findings()
    if late_findings is not None and findings:
        raise report(findings, late_findings.step, comm, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is known of a step on the device, and the same on all ranks but for ``first_bad``.

    Attributes:
        layout: of the vector.
        facts: the fields of StepStats that the host knows.
        rank: of this rank.
        is_bad: () bool, whether a gradient of any rank was not finite; nothing was sent then.
        first_bad: (1,) int32 index of this rank's first bad sum, the vector's length where there is none.
        numbers: whether a message was too small, the threshold as bits of a float32, then every rank's count.
        take_back_where_: takes the step back where a () bool is true, without the host.
        await_: called with what the host has yet to learn of the step, where it must stop if that is bad.
    """

    layout: Layout
    facts: Mapping[str, Any]
    rank: int
    is_bad: Tensor
    first_bad: Tensor
    numbers: Tensor
    take_back_where_: Callable[[Tensor], None]
    await_: Callable[[LateFindings], None]

    def late_findings(self, is_bad: Tensor) -> LateFindings:
        """Return what the host has to learn, of which the copy begins."""
        return LateFindings(
            self.layout, self.facts["step"], Late(torch.cat([is_bad.view(1).to(torch.int32), self.first_bad]))
        )

    def stats(self, is_bad: Tensor) -> StepStats:
        """Return statistics whose late numbers are on their way."""
        late = Late(torch.cat([is_bad.view(1).to(self.numbers.dtype), self.numbers]))
        unknown: dict[str, Any] = {"counts": (), "local_count": 0, "global_count": 0, "threshold": None}
        return LateStats(**self.facts, **unknown, skipped=False, late=late, to_fields=partial(_late_fields, self.rank))


class LateAttempt(Attempt):
    """An attempt that is decided on its device. Whoever looks at its findings or its counts waits for it.

    Args:
        grad: (numel,) holds the update, zero in a bad step.
        verdict: see Verdict.
    """

    __slots__ = ("verdict",)
    verdict: Verdict

    def __init__(self, grad: Tensor, verdict: Verdict) -> None:
        object.__setattr__(self, "grad", grad)
        object.__setattr__(self, "verdict", verdict)
        object.__setattr__(self, "undo", self._undo)

    def _undo(self) -> None:
        self.verdict.take_back_where_(torch.ones_like(self.verdict.is_bad))

    @property
    def stats(self) -> StepStats:
        """The statistics, as if the step counted."""
        return self.verdict.stats(torch.zeros_like(self.verdict.is_bad))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was not finite; the host waits for it."""
        return self.verdict.late_findings(self.verdict.is_bad).findings()

    def decide_late(self, attempts: Sequence[Attempt], policy: Policy) -> Decision | None:
        """Decide on a GPU without its host: buckets are taken back there where any is bad; see Attempt."""
        verdicts = [attempt.verdict for attempt in attempts if isinstance(attempt, LateAttempt)]
        if len(verdicts) < len(attempts) or self.grad.device.type == "cpu":
            return None
        is_bad = verdicts[0].is_bad
        if len(verdicts) > 1:
            is_bad = torch.stack([verdict.is_bad for verdict in verdicts]).any()
            for verdict in verdicts:
                verdict.take_back_where_(is_bad)
        if policy == "stop":
            for verdict in verdicts:
                verdict.await_(verdict.late_findings(is_bad))
        return Decision(tuple(verdict.stats(is_bad) for verdict in verdicts))


def _late_fields(rank: int, numbers: Sequence[int]) -> dict[str, Any]:
    """Return the late fields of a rank's statistics."""
    skipped, overfull, bits, *counts = numbers
    return {
        "skipped": bool(skipped),
        "overfull": bool(overfull),
        "threshold": struct.unpack("=f", struct.pack("=i", bits))[0],
        "counts": tuple(counts),
        "local_count": counts[rank],
        "global_count": 0 if skipped else sum(counts),
    }
