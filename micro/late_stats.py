"""Statistics of a step whose counts are still on their way from the device."""

import struct
from dataclasses import dataclass, field

from micro.late import Late
from micro.stats import StepStats

_LATE = frozenset({"counts", "local_count", "global_count", "threshold", "skipped", "overfull"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LateStats(StepStats):
    """StepStats that waits for the device when one of the late numbers is first asked for.

    Attributes:
        rank: of this rank, among the counts.
        late: whether the step was skipped, whether a message was too small, the threshold as bits of a float32, then
            every rank's count; None once they have been read.
    """

    rank: int
    late: Late | None = field(repr=False, compare=False)

    def __getattribute__(self, name: str) -> object:
        """Return an attribute; read the late numbers before one of them."""
        if name in _LATE:
            _fill(self)
        return object.__getattribute__(self, name)


def _fill(stats: LateStats) -> None:
    late: Late | None = object.__getattribute__(stats, "late")
    if late is None:
        return
    skipped, overfull, bits, *counts = late.read()
    numbers = {
        "skipped": bool(skipped),
        "overfull": bool(overfull),
        "threshold": struct.unpack("=f", struct.pack("=i", bits))[0],
        "counts": tuple(counts),
        "local_count": counts[object.__getattribute__(stats, "rank")],
        "global_count": 0 if skipped else sum(counts),
        "late": None,
    }
    for name, number in numbers.items():
        object.__setattr__(stats, name, number)
