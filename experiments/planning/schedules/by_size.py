"""Schedules by size, as in DDP: a group is closed when it reaches its cap."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from experiments.planning.schedules.base import Ends, Problem, Schedule

MIB = 2**20


class BySize(Schedule):
    """Close each group when it reaches its cap. A gradient is never split, so a group may exceed the cap."""

    is_planned: ClassVar[bool] = False

    @property
    @abstractmethod
    def caps_mb(self) -> tuple[float, float]:
        """The cap of the first group, and that of all others, in MiB."""

    def cut(self, problem: Problem) -> Ends:
        """Return groups that reach their caps, except for the last."""
        ends, start, num_layers = [], 0, len(problem.trace.layers)
        cap, later = self.caps_mb
        for stop in range(1, num_layers):
            if problem.num_bytes(start, stop) + 1 > cap * MIB:  # DDP's caps are whole bytes
                ends.append(stop)
                start, cap = stop, later
        return (*ends, num_layers)

    def bucket_cap_mb(self, model_mb: float) -> float | None:
        """Return the cap, limited to the model's size; None if the first cap differs, as by default in DDP."""
        first, later = self.caps_mb
        return min(later, model_mb + 1) if first == later else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layerwise(BySize):
    """Send each gradient as soon as it is complete (wait-free back-propagation): most overlap, most latencies.

    Source: Zhang et al., Poseidon (WFBP), USENIX ATC 2017, arXiv 1706.03292.
    """

    name: ClassVar[str] = "layerwise"
    caps_mb = (1 / MIB, 1 / MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Single(BySize):
    """Send all gradients at once after backward: one latency, no overlap, and one selection from all elements.

    Source: the single-layer communication of SyncEASGD, You, Buluç and Demmel, SC 2017, arXiv 1708.02983.
    """

    name: ClassVar[str] = "single"
    caps_mb = (math.inf, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddp(BySize):
    """Group as DistributedDataParallel does by default: 1 MiB first, then 25 MiB each.

    The small first bucket is sent early. These buckets apply from the second step on; the first step has a single one,
    because the order of gradients is not yet known.

    Source: Li et al., PyTorch Distributed, VLDB 2020, arXiv 2006.15704; the sizes are those of torch 2.11 to 2.15.
    """

    name: ClassVar[str] = "ddp"
    caps_mb = (1, 25)
