"""A reduction of which the host does not know yet whether all gradients were finite: the device does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from micro.flat import Layout
from micro.late import Late
from micro.late_stats import LateStats
from micro.nonfinite import Finding, Policy
from micro.reducers.attempt import Attempt, Decision
from micro.stats import StepStats


@dataclass(frozen=True, slots=True)
class News:
    """What the host learns of a step when it has arrived.

    Attributes:
        layout: of the vector.
        step: its number.
        late: whether the step was bad, and this rank's first bad index, the vector's length where there is none.
    """

    layout: Layout
    step: int
    late: Late

    def findings(self) -> tuple[Finding, ...]:
        """Return what was not finite; the host waits for it."""
        is_bad, first_bad = self.late.read()
        if not is_bad:
            return ()
        return (Finding(self.layout, first_bad if first_bad < self.layout.numel else None),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is known of a step on the device, and the same on all ranks but for ``first_bad``.

    Attributes:
        layout: of the vector.
        facts: the fields of StepStats that the host knows.
        rank: of this rank.
        is_bad: () bool, whether a gradient of any rank was not finite; nothing was sent then.
        first_bad: (1,) int32 index of this rank's first bad sum, the vector's length where there is none.
        numbers: the other late numbers of LateStats, in their order.
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
    await_: Callable[[News], None]

    def news(self, is_bad: Tensor) -> News:
        """Return what the host has to learn, of which the copy begins."""
        return News(self.layout, self.facts["step"], Late(torch.cat([is_bad.view(1).to(torch.int32), self.first_bad])))

    def stats(self, is_bad: Tensor) -> StepStats:
        """Return statistics whose late numbers are on their way."""
        late = Late(torch.cat([is_bad.view(1).to(self.numbers.dtype), self.numbers]))
        unknown: dict[str, Any] = {"counts": (), "local_count": 0, "global_count": 0, "threshold": None}
        return LateStats(**self.facts, **unknown, skipped=False, rank=self.rank, late=late)


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
        return self.verdict.news(self.verdict.is_bad).findings()

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
                verdict.await_(verdict.news(is_bad))
        return Decision(tuple(verdict.stats(is_bad) for verdict in verdicts))
