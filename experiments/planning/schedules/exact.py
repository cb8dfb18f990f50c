"""Optimal schedules, by dynamic programming over the start of the last group."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import ClassVar, NamedTuple, Optional

from experiments.planning.schedules.base import Ends, Problem, Schedule

BEAM = 8  # states per layer in the quick plan that bounds the search


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact(Schedule):
    """Find the groups with which all gradients are reduced earliest, for any cost function.

    The first j layers are reduced at E(j) = min over i < j of max(E(i), ready(j)) + T(bytes of i..j), because an
    earlier free lane is never worse. O(layers^2). T may be any function of the size: affine, measured, or with jumps.

    Selection is counted as if it occupied the lane and did not delay backward: a good plan, but not the best, for which
    use `sparse_exact`.

    Source: the step model of MG-WFBP (Shi, Chu and Li, INFOCOM 2019, arXiv 1912.09268) with the optimum over all
    groupings in place of its greedy rule.
    """

    name: ClassVar[str] = "exact"

    def cut(self, problem: Problem) -> Ends:
        """Return the best groups; among equal ones those with the longest last group."""

        def seconds(start: int, stop: int) -> float:
            num_bytes = problem.num_bytes(start, stop)
            return problem.select(num_bytes) + problem.exchange(num_bytes)

        best = [(0.0, 0)]  # for the first j layers: end of reduction, and start of the last group
        for stop, ready in enumerate(problem.ready_s, start=1):
            best.append(min((max(best[start][0], ready) + seconds(start, stop), start) for start in range(stop)))
        ends = [len(problem.trace.layers)]
        while start := best[ends[-1]][1]:
            ends.append(start)
        return tuple(reversed(ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseExact(Schedule):
    """Find the groups with which a step with selection ends earliest.

    A selection delays the rest of backward, so the end of a group's reduction is not enough: a state consists of the
    seconds of selection so far and the time when the lane is free. Dynamic programming keeps the Pareto front of states
    for each number of layers, and drops states that cannot beat a quick plan. Without selection a front has one state,
    and the plan is as good as `exact`'s.

    Source: the step model of OMGS-SGD (Shi et al., INFOCOM 2020) with the optimum over all groupings in place of its
    greedy rule.
    """

    name: ClassVar[str] = "sparse_exact"

    def cut(self, problem: Problem) -> Ends:
        """Return the best groups."""
        search = _Search(problem)
        quick = search.best([_Limit(math.inf, math.inf)] * (search.num_layers + 1), width=BEAM)
        assert quick is not None  # no limit dropped a state
        better = search.best(search.limits(search.end_s(quick)), width=None)
        return min([quick, *([better] if better else [])], key=search.end_s).ends()


class _State(NamedTuple):
    """A grouping of the first layers: seconds of selection, end of the lane, number of layers, previous state.

    States with equal numbers of layers form a front: delays rise, lane times fall.
    """

    delay_s: float
    lane_s: float
    stop: int
    before: Optional["_State"]

    def ends(self) -> Ends:
        """Return where the groups end."""
        ends, state = [], self
        while state.before:
            ends.append(state.stop)
            state = state.before
        return tuple(reversed(ends))


class _Limit(NamedTuple):
    """The largest values of a state from which a given end is still reachable."""

    delay_s: float
    lane_s: float


class _Search:
    """The search over reachable states of a problem, with costs of each group computed once."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.num_layers = problem, len(problem.trace.layers)
        self.costs = {  # seconds of selection and exchange of each group
            (start, stop): (problem.select(size), problem.exchange(size))
            for start in range(self.num_layers)
            for stop in range(start + 1, self.num_layers + 1)
            for size in [problem.num_bytes(start, stop)]
        }

    def end_s(self, state: _State) -> float:
        """Return the end of backward and of all exchanges, for a state of all layers."""
        return max(state.lane_s, self.problem.trace.backward_s + state.delay_s)

    def best(self, limits: list[_Limit], width: int | None) -> _State | None:
        """Return the state of all layers that ends first, or None if no state is within the limits.

        Args:
            width: largest number of states kept per front, evenly spread.
        """
        fronts = [[_State(0.0, 0.0, 0, None)]]
        for stop in range(1, self.num_layers + 1):
            front = _pareto(state for before in fronts for state in self._reach(before, stop, limits[stop]))
            if width is not None and len(front) > width:
                front = [front[(2 * place + 1) * len(front) // (2 * width)] for place in range(width)]
            fronts.append(front)
        return min(fronts[-1], key=self.end_s, default=None)

    def _reach(self, front: list[_State], stop: int, limit: _Limit) -> Iterator[_State]:
        """Yield the states reached from a front by one more group, up to ``stop``, within the limit."""
        if not front:
            return
        select, exchange = self.costs[front[0].stop, stop]
        ready = self.problem.ready_s[stop - 1]
        for state in front:
            delay = state.delay_s + select
            if delay > limit.delay_s:
                return
            lane = max(state.lane_s, ready + delay) + exchange
            if lane <= limit.lane_s:
                yield _State(delay, lane, stop, state)
            if state.lane_s <= ready + delay:  # later states are selected later, without a freer lane
                return

    def limits(self, end_s: float) -> list[_Limit]:
        """Return limits of all states from which an end of at most ``end_s`` is reachable.

        Computed backwards from the last layer: selections must end, and the lane be free, early enough for some next
        group to meet its limit.
        """
        least = [0.0]  # for each number of layers, the least seconds of selection
        for stop in range(1, self.num_layers + 1):
            least.append(min(least[start] + self.costs[start, stop][0] for start in range(stop)))
        limits = [_Limit(end_s - self.problem.trace.backward_s, end_s)]
        for start in reversed(range(self.num_layers)):
            delay_s = lane_s = -math.inf
            for stop, later in enumerate(reversed(limits), start=start + 1):
                select, exchange = self.costs[start, stop]
                sent, ready = later.lane_s - exchange, self.problem.ready_s[stop - 1]  # latest time of sending
                delay_s = max(delay_s, min(later.delay_s, sent - ready) - select)
                if ready + least[stop] <= sent:
                    lane_s = max(lane_s, sent)
            limits.append(_Limit(delay_s, lane_s))
        return limits[::-1]


def _pareto(states: Iterable[_State]) -> list[_State]:
    """Return the Pareto-optimal states, by rising delay."""
    front: list[_State] = []
    for state in sorted(states, key=itemgetter(0, 1)):
        if not front or state.lane_s < front[-1].lane_s:
            front.append(state)
    return front
