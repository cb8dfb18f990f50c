"""Groups that follow from sizes alone, as DDP makes them: a group is closed when it has reached its cap."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from experiments.planning.schedules.base import Ends, Problem, Schedule

MIB = 2**20


class BySize(Schedule):
    """Close each group when it has reached its cap. A gradient is never split, so a group may be larger."""

    is_planned: ClassVar[bool] = False

    @property
    @abstractmethod
    def caps_mb(self) -> tuple[float, float]:
        """The cap of the first group, and that of all others, in MiB."""

    def cut(self, problem: Problem) -> Ends:
        """Return groups that have reached their caps, all but the last."""
        ends, start, num_layers = [], 0, len(problem.trace.layers)
        cap, later = self.caps_mb
        for stop in range(1, num_layers):
            if problem.num_bytes(start, stop) + 1 > cap * MIB:  # DDP's caps are whole bytes
                ends.append(stop)
                start, cap = stop, later
        return (*ends, num_layers)

    def bucket_cap_mb(self, model_mb: float) -> float | None:
        """Return the cap, no larger than a model needs; None where the first one differs, as DDP's by default."""
        first, later = self.caps_mb
        return min(later, model_mb + 1) if first == later else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layerwise(BySize):
    """Send each gradient as soon as it is complete: wait-free back-propagation, most overlap and most start-ups.

    Source: Zhang et al., Poseidon (WFBP), USENIX ATC 2017, arXiv 1706.03292.
    """

    name: ClassVar[str] = "layerwise"
    caps_mb = (1 / MIB, 1 / MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Single(BySize):
    """Send all gradients at once after backward: one start-up and no overlap, and all elements compete in a selection.

    Source: the single-layer communication of SyncEASGD, You, Buluç and Demmel, SC 2017, arXiv 1708.02983.
    """

    name: ClassVar[str] = "single"
    caps_mb = (math.inf, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddp(BySize):
    """Group as DistributedDataParallel does by default: 1 MiB first, then 25 MiB each.

    The small first bucket starts to travel early. These are the buckets of the second step and later: the first step
    has a single one, because the order of the gradients is not known yet.

    Source: Li et al., PyTorch Distributed, VLDB 2020, arXiv 2006.15704; the sizes are those of torch 2.11 to 2.15.
    """

    name: ClassVar[str] = "ddp"
    caps_mb = (1, 25)
