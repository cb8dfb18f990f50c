"""One pass from the first gradient to the last: does the next one join the open group, or is the group sent?"""

from collections.abc import Callable
from dataclasses import dataclass

from micro.planning.schedules.base import Ends, Problem, Seconds


@dataclass(frozen=True, slots=True)
class Pair:
    """An open group and the gradient that follows it; seconds from the start of backward.

    Attributes:
        group_bytes, next_bytes: of the group, of the gradient that follows.
        ready_s: when the group's last gradient is complete, selections of earlier groups included.
        next_s: when the following gradient is complete if nothing is selected in between.
        lane_s: when the earlier groups are reduced.
    """

    group_bytes: int
    next_bytes: int
    ready_s: float
    next_s: float
    lane_s: float

    def saved(self, exchange: Seconds) -> float:
        """Return the seconds of exchange that joining saves: the start-up, where cost is affine in size."""
        together = exchange(self.group_bytes + self.next_bytes)
        return exchange(self.group_bytes) + exchange(self.next_bytes) - together


def greedy(problem: Problem, joins: Callable[[Pair], bool]) -> Ends:
    """Return the groups that follow from deciding once about each gradient, in backward order."""
    ends = []
    delay = lane = 0.0
    start = 0
    for stop in range(1, len(problem.trace.layers)):
        num_bytes, ready = problem.num_bytes(start, stop), problem.ready_s[stop - 1] + delay
        pair = Pair(num_bytes, problem.num_bytes(stop, stop + 1), ready, problem.ready_s[stop] + delay, lane)
        if joins(pair):
            continue
        delay += problem.select(num_bytes)
        lane = max(lane, ready + problem.select(num_bytes)) + problem.exchange(num_bytes)
        ends.append(stop)
        start = stop
    return (*ends, len(problem.trace.layers))
