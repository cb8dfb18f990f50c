"""ASC-WFBP's grouping: merge only gradients that would have to wait for the lane in any case."""

from dataclasses import dataclass, replace
from typing import ClassVar

from micro.planning.schedules.base import Ends, Problem, Schedule, no_time
from micro.planning.schedules.greedy import Pair, greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Asc(Schedule):
    """Merge gradients while the lane is busy: no group ever waits for a gradient.

    Source: Shi, Chu and Li, Exploiting simultaneous communications to accelerate data parallel distributed deep
    learning, INFOCOM 2021: the grouping of its public code. Differences: the paper sends two groups at once to
    compensate for the start-ups that this rule does not save; here, as in the public planner's own model, there is one
    lane. The time of selection is ignored.
    """

    name: ClassVar[str] = "asc"

    def cut(self, problem: Problem) -> Ends:
        """Return groups that are sent as soon as the lane is free."""

        def joins(pair: Pair) -> bool:
            return pair.lane_s > pair.next_s

        return greedy(replace(problem, select=no_time), joins)
