"""MG-WFBP: merge where waiting for the next gradient costs less than a start-up."""

from dataclasses import dataclass, replace
from typing import ClassVar

from micro.planning.schedules.base import Ends, Problem, Schedule, no_time
from micro.planning.schedules.greedy import Pair, greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class MgWfbp(Schedule):
    """Let a gradient wait for the next one if the wait is shorter than the start-up that it saves.

    The rule looks at two neighbours at a time, each wait by itself: many short waits in a row may cost more than they
    save. `exact` does not have that weakness.

    Source: Shi, Chu and Li, MG-WFBP, INFOCOM 2019 and IEEE TPDS 2021, arXiv 1912.09268, theorem 1. Differences: one
    pass instead of a re-computation of all start times after each merge, with the same groups; the start-up is what
    the cost itself shows for the two pieces, T(x) + T(y) - T(x + y), which is the paper's ``a`` where T(x) = a + b x,
    so a cost need not be affine; the public code looks up a and b in a table of two clusters. As in the paper, what
    gradients cost beside their exchange (a selection) is ignored.
    """

    name: ClassVar[str] = "mgwfbp"

    def cut(self, problem: Problem) -> Ends:
        """Return the published groups."""

        def joins(pair: Pair) -> bool:
            return pair.next_s - max(pair.lane_s, pair.ready_s) < pair.saved(problem.exchange)

        return greedy(replace(problem, select=no_time), joins)
