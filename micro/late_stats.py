"""Statistics of a step whose numbers are still on their way from the device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from micro.late import Late
from micro.stats import StepStats

_LATE = frozenset({"counts", "local_count", "global_count", "threshold", "skipped", "overfull", "forgotten"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LateStats(StepStats):
    """StepStats that waits for the device when one of the late numbers is first asked for.

    Attributes:
        late: the numbers on their way; None once they have been read.
        to_fields: returns the fields that follow from them.
    """

    late: Late | None = field(repr=False, compare=False)
    to_fields: Callable[[Sequence[float]], Mapping[str, Any]] = field(repr=False, compare=False)

    def __getattribute__(self, name: str) -> object:
        """Return an attribute; read the late numbers before one of them."""
        if name in _LATE:
            _fill(self)
        return object.__getattribute__(self, name)


def _fill(stats: LateStats) -> None:
    late: Late | None = object.__getattribute__(stats, "late")
    if late is None:
        return
    for name, number in {**stats.to_fields(late.read()), "late": None}.items():
        object.__setattr__(stats, name, number)
