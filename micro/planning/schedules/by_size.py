"""Groups that follow from sizes alone, as DDP makes them: a group is closed when it has reached its cap."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import ClassVar

from micro.planning.schedules.base import Ends, Problem, Schedule

MIB = 2**20
FIRST, CAP = 1 * MIB, 25 * MIB  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, and bucket_cap_mb where it is not given


class BySize(Schedule):
    """Close each group when it has reached the next cap. A gradient is never split, so a group may be larger."""

    is_planned: ClassVar[bool] = False

    @abstractmethod
    def caps(self) -> Iterator[float]:
        """Yield the cap of each group, in bytes."""

    def cut(self, problem: Problem) -> Ends:
        """Return groups that have reached their caps, all but the last."""
        caps, ends, start = self.caps(), [], 0
        cap, num_layers = next(caps), len(problem.trace.layers)
        for stop in range(1, num_layers):
            if problem.num_bytes(start, stop) >= cap:
                ends.append(stop)
                start, cap = stop, next(caps)
        return (*ends, num_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layerwise(BySize):
    """Send each gradient as soon as it is complete: wait-free back-propagation, most overlap and most start-ups.

    Source: Zhang et al., Poseidon (WFBP), USENIX ATC 2017, arXiv 1706.03292.
    """

    name: ClassVar[str] = "layerwise"

    def caps(self) -> Iterator[float]:
        """Yield a byte, which every gradient reaches by itself."""
        return repeat(1)

    def bucket_cap_mb(self, model_mb: float) -> float:
        """Return the cap of every bucket."""
        return 1 / MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Single(BySize):
    """Send all gradients at once after backward: one start-up and no overlap, and all elements compete in a selection.

    Source: the single-layer communication of SyncEASGD, You, Buluç and Demmel, SC 2017, arXiv 1708.02983.
    """

    name: ClassVar[str] = "single"

    def caps(self) -> Iterator[float]:
        """Yield what no group reaches."""
        return repeat(math.inf)

    def bucket_cap_mb(self, model_mb: float) -> float:
        """Return the cap of every bucket."""
        return model_mb + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Capped(BySize):
    """Close a group when it has reached a fixed size, as DistributedDataParallel does with ``bucket_cap_mb``.

    Args:
        cap_mb: the size, in MiB.

    Raises:
        ValueError: a cap that is not positive.
    """

    cap_mb: float = 25.0
    name: ClassVar[str] = "capped"

    def __post_init__(self) -> None:
        check_cap(self.cap_mb)

    def caps(self) -> Iterator[float]:
        """Yield the same cap for every group."""
        return repeat(int(self.cap_mb * MIB))

    def bucket_cap_mb(self, model_mb: float) -> float:
        """Return the cap of every bucket."""
        return self.cap_mb


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddp(BySize):
    """Group as DistributedDataParallel does by default: 1 MiB first, then 25 MiB each.

    The small first bucket starts to travel early. These are the buckets of the second step and later: the first step
    has a single one, because the order of the gradients is not known yet.

    Source: Li et al., PyTorch Distributed, VLDB 2020, arXiv 2006.15704; the sizes are those of torch 2.11 to 2.15.
    """

    name: ClassVar[str] = "ddp"

    def caps(self) -> Iterator[float]:
        """Yield DDP's own caps."""
        return chain([FIRST], repeat(CAP))


def check_cap(cap_mb: float) -> None:
    """Raise ValueError unless a cap is positive."""
    if not 0 < cap_mb < math.inf:
        raise ValueError(f"cap_mb must be a number above 0, got {cap_mb}; for one group take schedule single")
