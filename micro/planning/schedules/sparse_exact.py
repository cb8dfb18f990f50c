"""The optimal groups for gradients that are selected before they are sent."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import ClassVar, NamedTuple, Optional

from micro.planning.schedules.base import Ends, Problem, Schedule, Seconds

BEAM = 8  # states per layer of the quick plan whose step bounds the search


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseExact(Schedule):
    """Find the groups with which a step with selection ends earliest.

    A selection delays the rest of backward, so the time at which a group is reduced does not describe it fully: a
    state is the seconds of selection so far and the time at which the lane is free. Dynamic programming keeps, for each
    number of layers, the states that no other state beats in both (the Pareto front). States that cannot beat a quick
    plan any more are dropped.
    Without selection a front has one state, and the plan is as good as `exact`'s.

    Args:
        width: keep at most so many states of a front, evenly spread: faster, and not exact any more; 0 keeps all.

    Source: the step model of OMGS-SGD (Shi et al., INFOCOM 2020) with the optimum over all groupings in place of its
    greedy rule.

    Raises:
        ValueError: a negative width.
    """

    width: int = 0
    name: ClassVar[str] = "sparse_exact"

    def __post_init__(self) -> None:
        if not isinstance(self.width, int) or self.width < 0:
            raise ValueError(f"width must be a whole number of at least 0, got {self.width}")

    def cut(self, problem: Problem) -> Ends:
        """Return the best groups."""
        search = Search(problem)
        quick = search.best(search.no_limits(), self.width or BEAM)
        assert quick is not None  # nothing was dropped for its limits
        if self.width:
            return quick.ends()
        better = search.best(search.limits(search.end_s(quick)), width=0)
        return min([quick, *([better] if better else [])], key=search.end_s).ends()


class State(NamedTuple):
    """The first layers in groups.

    Attributes:
        delay_s: seconds of all their selections.
        lane_s: when the last group is reduced.
        stop: number of layers.
        before: the same without the last group; None where there is none.
    """

    delay_s: float
    lane_s: float
    stop: int
    before: Optional["State"]

    def ends(self) -> Ends:
        """Return where the groups end."""
        ends, state = [], self
        while state.before:
            ends.append(state.stop)
            state = state.before
        return tuple(reversed(ends))


Front = list[State]  # delay_s rises, lane_s falls


class Limit(NamedTuple):
    """The latest values of a state from which a given end can still be reached."""

    delay_s: float
    lane_s: float


class Search:
    """The states that can be reached in a problem, with the costs of each group computed once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_layers = len(problem.trace.layers)
        self.select = self._of_groups(problem.select)
        self.exchange = self._of_groups(problem.exchange)

    def _of_groups(self, seconds: Seconds) -> list[list[float]]:
        """Return costs[start][stop - start - 1]."""
        size = self.problem.num_bytes
        stops = range(1, self.num_layers + 1)
        return [[seconds(size(start, stop)) for stop in stops[start:]] for start in range(self.num_layers)]

    def costs(self, start: int, stop: int) -> tuple[float, float]:
        """Return the seconds to select in a group, and to exchange it."""
        return self.select[start][stop - start - 1], self.exchange[start][stop - start - 1]

    def end_s(self, state: State) -> float:
        """Return the end of backward and of all exchanges, for a state of all layers."""
        return max(state.lane_s, self.problem.trace.backward_s + state.delay_s)

    def best(self, limits: list[Limit], width: int) -> State | None:
        """Return the state of all layers that ends first, or None if no state keeps the limits."""
        fronts: list[Front] = [[State(0.0, 0.0, 0, None)]]
        for stop in range(1, self.num_layers + 1):
            reached = [state for front in fronts for state in self._reach(front, stop, limits[stop])]
            fronts.append(_thinned(_pareto(reached), width))
        return min(fronts[-1], key=self.end_s, default=None)

    def _reach(self, front: Front, stop: int, limit: Limit) -> Iterator[State]:
        """Yield the states that follow from a front by one more group, up to ``stop``, within the limit."""
        if not front:
            return
        select, exchange = self.costs(front[0].stop, stop)
        ready = self.problem.ready_s[stop - 1]
        for state in front:
            delay = state.delay_s + select
            if delay > limit.delay_s:
                return
            lane = max(state.lane_s, ready + delay) + exchange
            if lane <= limit.lane_s:
                yield State(delay, lane, stop, state)
            if state.lane_s <= ready + delay:  # those that follow are selected later and find no freer lane
                return

    def no_limits(self) -> list[Limit]:
        """Return limits that every state keeps."""
        return [Limit(math.inf, math.inf)] * (self.num_layers + 1)

    def limits(self, end_s: float) -> list[Limit]:
        """Return limits that every state on the way to an end of at most ``end_s`` keeps.

        Backward from the last layer: the lane must be free in time for some next group to be reduced by that group's
        own limit, and the selections must be done in time for it.
        """
        least = self._least_delays()
        limits = [Limit(end_s - self.problem.trace.backward_s, end_s)]
        for start in reversed(range(self.num_layers)):
            delay_s = lane_s = -math.inf
            for stop, (later_delay_s, later_lane_s) in enumerate(reversed(limits), start=start + 1):
                select, exchange = self.costs(start, stop)
                sent = later_lane_s - exchange  # at the latest
                ready = self.problem.ready_s[stop - 1]
                delay_s = max(delay_s, min(later_delay_s, sent - ready) - select)
                if ready + least[stop] <= sent:
                    lane_s = max(lane_s, sent)
            limits.append(Limit(delay_s, lane_s))
        return limits[::-1]

    def _least_delays(self) -> list[float]:
        """Return for each number of layers the least seconds of selection that any groups of them need."""
        least = [0.0]
        for stop in range(1, self.num_layers + 1):
            least.append(min(least[start] + self.costs(start, stop)[0] for start in range(stop)))
        return least


def _pareto(states: Iterable[State]) -> Front:
    """Return the states that no other state beats in one value without being worse in the other, by rising delay."""
    front: Front = []
    for state in sorted(states, key=itemgetter(0, 1)):
        if not front or state.lane_s < front[-1].lane_s:
            front.append(state)
    return front


def _thinned(front: Front, width: int) -> Front:
    """Return ``width`` states of a front, from the middle of equal slices; 0 returns all."""
    if not width or len(front) <= width:
        return front
    return [front[(2 * place + 1) * len(front) // (2 * width)] for place in range(width)]
