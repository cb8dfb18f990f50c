"""The buckets of DistributedDataParallel itself."""

from dataclasses import dataclass
from itertools import chain, repeat
from typing import ClassVar

from micro.planning.schedules.base import Ends, Problem, Schedule
from micro.planning.schedules.capped import MIB, filled

FIRST, CAP = 1 * MIB, 25 * MIB  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, and bucket_cap_mb where it is not given


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddp(Schedule):
    """Group as DistributedDataParallel does by default: 1 MiB first, then 25 MiB each.

    The small first bucket starts to travel early. These are the buckets of the second step and later: the first step
    has a single one, because the order of the gradients is not known yet.

    Source: Li et al., PyTorch Distributed, VLDB 2020, arXiv 2006.15704; the sizes are those of torch 2.11 to 2.15.
    """

    name: ClassVar[str] = "ddp"
    is_planned: ClassVar[bool] = False

    def cut(self, problem: Problem) -> Ends:
        """Return DDP's own buckets."""
        return filled(problem, chain([FIRST], repeat(CAP)))
