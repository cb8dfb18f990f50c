"""Groups of a fixed size, as DDP makes them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar

from micro.planning.schedules.base import Ends, Problem, Schedule

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Capped(Schedule):
    """Close a group when it has reached a fixed size, as DistributedDataParallel does with ``bucket_cap_mb``.

    A gradient is never split, so a group may be larger than its cap by nearly one gradient.

    Args:
        cap_mb: the size, in MiB.

    Raises:
        ValueError: a cap that is not positive.
    """

    cap_mb: float = 25.0
    name: ClassVar[str] = "capped"
    is_planned: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_cap(self.cap_mb)

    def cut(self, problem: Problem) -> Ends:
        """Return groups that have reached the cap, all but the last."""
        return filled(problem, repeat(int(self.cap_mb * MIB)))

    def bucket_cap_mb(self, model_mb: float) -> float:
        """Return the cap of every bucket."""
        return self.cap_mb


def filled(problem: Problem, caps: Iterator[int]) -> Ends:
    """Return groups that each close when they have reached the next of ``caps``, in bytes; the last may be smaller."""
    ends, start, cap = [], 0, next(caps)
    num_layers = len(problem.trace.layers)
    for stop in range(1, num_layers):
        if problem.num_bytes(start, stop) >= cap:
            ends.append(stop)
            start, cap = stop, next(caps)
    return (*ends, num_layers)


def check_cap(cap_mb: float) -> None:
    """Raise ValueError unless a cap is positive."""
    if not 0 < cap_mb < math.inf:
        raise ValueError(f"cap_mb must be a number above 0, got {cap_mb}; for one group take schedule single")
