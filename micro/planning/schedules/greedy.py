"""One pass from the first gradient to the last: does the next one join the open group, or is the group sent?"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from micro.parts import Rule, check_rule
from micro.planning.schedules.base import Ends, Problem, Schedule, Seconds, no_time


@dataclass(frozen=True, slots=True)
class Pair:
    """An open group and the gradient that follows it; seconds from the start of backward.

    Attributes:
        group, layer: bytes of the group, and of the gradient that follows.
        ready_s: when the group's last gradient is complete, selections of earlier groups included.
        next_s: when the following gradient is complete if nothing is selected in between.
        lane_s: when the earlier groups are reduced.
    """

    group: int
    layer: int
    ready_s: float
    next_s: float
    lane_s: float

    def saved(self, exchange: Seconds) -> float:
        """Return the seconds of exchange that joining saves: the start-up, where cost is affine in size."""
        return exchange(self.group) + exchange(self.layer) - exchange(self.group + self.layer)


class Greedy(Schedule):
    """Decide once about each gradient, in backward order."""

    @abstractmethod
    def joins(self, pair: Pair, problem: Problem) -> bool:
        """Return whether the next gradient joins the open group."""

    def cut(self, problem: Problem) -> Ends:
        """Return the groups that follow."""
        ends = []
        delay = lane = 0.0
        start = 0
        for stop in range(1, len(problem.trace.layers)):
            size, ready = problem.num_bytes(start, stop), problem.ready_s[stop - 1] + delay
            pair = Pair(size, problem.num_bytes(stop, stop + 1), ready, problem.ready_s[stop] + delay, lane)
            if self.joins(pair, problem):
                continue
            delay += problem.select(size)
            lane = max(lane, ready + problem.select(size)) + problem.exchange(size)
            ends.append(stop)
            start = stop
        return (*ends, len(problem.trace.layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class MgWfbp(Greedy):
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
        return Greedy.cut(self, replace(problem, select=no_time))

    def joins(self, pair: Pair, problem: Problem) -> bool:
        """Return whether the wait is shorter than the start-up."""
        saved = pair.saved(problem.exchange)
        return saved >= 0 and pair.next_s - max(pair.lane_s, pair.ready_s) < saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Asc(Greedy):
    """Merge gradients while the lane is busy: no group ever waits for a gradient.

    Source: Shi, Chu and Li, Exploiting simultaneous communications to accelerate data parallel distributed deep
    learning, INFOCOM 2021: the grouping of its public code. Differences: the paper sends two groups at once to
    compensate for the start-ups that this rule does not save; here, as in the public planner's own model, there is one
    lane. The time of selection is ignored.
    """

    name: ClassVar[str] = "asc"

    def cut(self, problem: Problem) -> Ends:
        """Return groups that are sent as soon as the lane is free."""
        return Greedy.cut(self, replace(problem, select=no_time))

    def joins(self, pair: Pair, problem: Problem) -> bool:
        """Return whether the lane is still busy when the next gradient is there."""
        return pair.lane_s > pair.next_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Omgs(Greedy):
    """Merge two neighbours if that saves more start-up than it costs in waiting and selection.

    Like MG-WFBP it decides about two neighbours at a time and does not see that a selection delays all of backward
    that follows; `sparse_exact` sees it. Without selection the repaired rule is MG-WFBP's.

    Args:
        rule: 'repaired', merge if the two are reduced earlier together than apart; 'published', the condition of the
            public code, whose waiting time lacks the selection of the second gradient, so that it merges too eagerly.

    Source: Shi et al., Communication-efficient distributed deep learning with merged gradient sparsification on GPUs
    (OMGS-SGD), INFOCOM 2020, and its public code. Differences of both rules: one pass, as in `mgwfbp`; the costs are
    those of the problem, where the code has s x log2(x) for a selection and two all-gathers from a table of one
    network; the gradient of the last layer is treated as all others, where the code leaves it out of the decisions.

    Raises:
        ValueError: no such rule.
    """

    rule: Rule = "repaired"
    name: ClassVar[str] = "omgs"

    def __post_init__(self) -> None:
        check_rule(self)

    def joins(self, pair: Pair, problem: Problem) -> bool:
        """Return whether the rule merges the two."""
        select, exchange, both = problem.select, problem.exchange, pair.group + pair.layer
        selected = pair.ready_s + select(pair.group)
        if self.rule == "published":
            more_select = select(both) - select(pair.group) - select(pair.layer)
            queued = max(pair.lane_s, selected) - pair.ready_s - select(pair.group)
            return pair.next_s - pair.ready_s + more_select - queued < pair.saved(exchange)
        together = max(pair.lane_s, pair.next_s + select(both)) + exchange(both)
        first = max(pair.lane_s, selected) + exchange(pair.group)
        second = pair.next_s + select(pair.group) + select(pair.layer)
        return together < max(first, second) + exchange(pair.layer)
