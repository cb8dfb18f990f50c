"""A sparse step on an accelerator whose host has not read whether it counts: a bad one has no effect there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from micro.comm import Comm
from micro.feedback import Undo
from micro.flat import Layout
from micro.health import FirstBad, flag_of
from micro.late import Late
from micro.late_stats import LateStats
from micro.nonfinite import Policy
from micro.on_device import on_device
from micro.reducers.attempt import Attempt, Decision, cut_where_
from micro.reducers.late_attempt import LateFindings
from micro.sparse import AllValues, Exchanged, MaskedValues
from micro.stats import StepStats


@dataclass(frozen=True, slots=True)
class Judged:
    """An exchange of which the device knows whether it has an effect.

    Attributes:
        exchanged: of which nothing has an effect in a bad step.
        is_good: () bool, whether all gradients and the update are finite; the same on all ranks.
        first_bad, in_update: (1,) index of this rank's first bad sum, and of the first one of the update that
            overflowed; the vector's length where there is none.
    """

    exchanged: Exchanged
    is_good: Tensor
    first_bad: Tensor
    in_update: Tensor

    def late(self, forgotten: Tensor | None) -> Late:
        """Return on their way what `LateFindings` needs, the number of updated elements, and what a decay took."""
        numbers = (~self.is_good, self.first_bad, self.in_update, self.exchanged.num_updated, forgotten)
        device = self.is_good.device
        given = (
            x if isinstance(x, Tensor) else on_device([x], torch.float64, device) for x in numbers if x is not None
        )
        return Late(torch.cat([x.view(1).double() for x in given]))


def can_wait(acc: Tensor, exchanged: Exchanged) -> bool:
    """Tell whether a device can leave an exchange without effect: one of lists, not of whole vectors."""
    entries = (*exchanged.update, exchanged.sent)
    return acc.device.type != "cpu" and not any(isinstance(each, AllValues) for each in entries)


def judged_(acc: Tensor, exchanged: Exchanged, scale: float, comm: Comm, first_bad: FirstBad) -> Judged:
    """Judge an exchange without the host, and cut ``acc`` (numel,) where the update overflowed.

    Args:
        scale: factor on the update.
        first_bad: where this rank's first bad sum is.
    """
    parts, numel = exchanged.update, acc.numel()
    is_sound = flag_of(exchanged.is_finite, torch.bool, acc.device).view(())
    beyond = comm.alike(lambda: [~torch.isfinite(part.values * scale) for part in parts])
    overflown, places = [each & is_sound for each in beyond], [parts[0].indices.new_full((1,), numel)]
    for part, is_cut in zip(parts, overflown, strict=True):
        places.append(part.indices.where(is_cut, numel))
        cut_where_(acc, part.indices, is_cut, comm.world_size)
    in_update = torch.cat(places).amin(0, keepdim=True)
    is_good = is_sound & (in_update == numel).view(())
    effective = replace(
        exchanged,
        is_finite=True,
        update=tuple(MaskedValues(part, is_good) for part in parts),
        sent=MaskedValues(exchanged.sent, is_good),
    )
    if not isinstance(first_bad, Tensor):
        first_bad = in_update.new_full((1,), numel if first_bad is None else first_bad)
    return Judged(effective, is_good, first_bad, in_update)


class UnreadAttempt(Attempt):
    """An attempt that had no effect where it was bad. Whoever looks at its findings or its late numbers waits for them.

    Args:
        stats: as if all was finite, without what is late.
        late: what `Judged.late` returned.
        await_: called with what the host has yet to learn of the step, where it must stop if that is bad.
    """

    __slots__ = ("await_", "late_findings")
    late_findings: LateFindings
    await_: Callable[[LateFindings], None]

    def __init__(
        self,
        grad: Tensor,
        stats: StepStats,
        layout: Layout,
        undo: Undo,
        late: Late,
        await_: Callable[[LateFindings], None],
    ) -> None:
        known = {field: getattr(stats, field) for field in StepStats.__slots__}
        unread = LateStats(**known, late=late, to_fields=_late_fields)
        object.__setattr__(self, "grad", grad)
        object.__setattr__(self, "stats", unread)
        object.__setattr__(self, "undo", undo)
        object.__setattr__(self, "late_findings", LateFindings(layout, stats.step, late))
        object.__setattr__(self, "await_", await_)

    @property
    def findings(self) -> Any:
        """What was not finite; the host waits for it."""
        return self.late_findings.findings()

    def decide_late(self, attempts: Sequence[Attempt], policy: Policy) -> Decision | None:
        """Decide a step of one bucket without the host; where there are more, it reads whether all were good."""
        if len(attempts) > 1:
            return None
        if policy == "stop":
            self.await_(self.late_findings)
        return Decision((self.stats,))


def _late_fields(numbers: Sequence[float]) -> dict[str, Any]:
    """Return the late fields of statistics."""
    is_bad, _, _, num_updated, *forgotten = numbers
    return {
        "skipped": bool(is_bad),
        "global_count": 0 if is_bad else int(num_updated),
        "forgotten": forgotten[0] if forgotten else None,
    }
