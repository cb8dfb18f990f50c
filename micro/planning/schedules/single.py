"""All gradients together."""

from dataclasses import dataclass
from typing import ClassVar

from micro.planning.schedules.base import Ends, Problem, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Single(Schedule):
    """Send all gradients at once after backward: one start-up and no overlap, and all elements compete in a selection.

    Source: the single-layer communication of SyncEASGD, You, Buluç and Demmel, SC 2017, arXiv 1708.02983.
    """

    name: ClassVar[str] = "single"
    is_planned: ClassVar[bool] = False

    def cut(self, problem: Problem) -> Ends:
        """Return one group."""
        return (len(problem.trace.layers),)

    def bucket_cap_mb(self, model_mb: float) -> float:
        """Return the cap of every bucket."""
        return model_mb + 1
