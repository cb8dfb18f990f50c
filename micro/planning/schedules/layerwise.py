"""Every gradient by itself."""

from dataclasses import dataclass
from typing import ClassVar

from micro.planning.schedules.base import Ends, Problem, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Layerwise(Schedule):
    """Send each gradient as soon as it is complete: wait-free back-propagation, most overlap and most start-ups.

    Source: Zhang et al., Poseidon (WFBP), USENIX ATC 2017, arXiv 1706.03292.
    """

    name: ClassVar[str] = "layerwise"
    is_planned: ClassVar[bool] = False

    def cut(self, problem: Problem) -> Ends:
        """Return one group per layer."""
        return tuple(range(1, len(problem.trace.layers) + 1))

    def bucket_cap_mb(self, model_mb: float) -> float:
        """Return the cap of every bucket."""
        return 1e-6  # every gradient reaches it by itself
