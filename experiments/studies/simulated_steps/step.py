"""One step of training, computed: from a trace of the model, the costs of a network, a method and a schedule."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import micro
from experiments.studies.simulated_steps.selection_formula import SelectionFormula, TwoLevelFormula
from experiments.training.schedule_problem import Selection, problem_of
from micro.parts import build
from micro.planning.costs import Network
from micro.planning.nodes import NodeNetwork
from micro.planning.schedules.base import Ends, Problem, Schedule, no_time
from micro.planning.traces import Trace

Row = dict[str, Any]
NetworkOf = Callable[[int], Network]  # of a number of workers
DENSE = "dense"
EXACT, SPARSE_EXACT = "exact", "sparse_exact"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train: a method under a schedule."""

    method: str
    schedule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Methods:
    """The methods that are compared, and what each computes before it sends.

    Attributes:
        reducers: by name of conf/sparsifier; dense is among them.
        selection: seconds of selection, for a number of workers.
    """

    reducers: Mapping[str, micro.Reducer]
    selection: Callable[[int], Selection]

    def problem(self, trace: Trace, network: Network, method: str, world_size: int) -> Problem:
        """Return the problem that a schedule solves for a method on ``world_size`` workers."""
        reducer, select = self.reducers[method], self.selection(world_size)
        return problem_of(trace, network, reducer, world_size, select=select, method=method)

    def two_level_problem(self, trace: Trace, network: NodeNetwork, method: str) -> Problem:
        """Return the problem for a method between nodes, with a dense mean within them."""
        local = network.ranks_per_node
        select = self.selection(network.world_size // local)
        assert isinstance(select, SelectionFormula), "times of two levels are computed, not measured"
        return problem_of(
            trace,
            network,
            self.two_level(method, local),
            network.world_size,
            select=TwoLevelFormula(of_shard=select, ranks_per_node=local),
            method=method,
        )

    def two_level(self, method: str, ranks_per_node: int) -> micro.TwoLevel:
        """Return a method between nodes, with a dense mean within them."""
        return micro.TwoLevel(reducer=self.reducers[method], ranks_per_node=ranks_per_node)

    @property
    def sparse(self) -> list[str]:
        """The methods that are not the baseline."""
        return [name for name in self.reducers if name != DENSE]


def simulate_step(problem: Problem, schedule: str, world_size: int) -> Row:
    """Return the numbers of one step under a schedule.

    Speed-up is over one worker, which neither sends nor selects: world_size * compute_s / step_s.
    """
    part = schedule_for(problem, schedule)
    return step_row(problem, part, part.cut(problem), world_size)


def step_row(problem: Problem, part: Schedule, ends: Ends, world_size: int) -> Row:
    """Return the numbers of one step whose groups end at ``ends``."""
    step = part.timeline(problem, ends)
    speedup = world_size * problem.trace.compute_s / step.step_s
    return {
        "num_groups": len(ends),
        "step_s": step.step_s,
        "exposed_s": step.exposed_s,
        "select_s": step.backward_s - problem.trace.backward_s,
        "speedup": speedup,
        "efficiency": speedup / world_size,
    }


def schedule_for(problem: Problem, schedule: str) -> Schedule:
    """Return the schedule of that name; the exact one is the one that knows of selection where there is any."""
    selects = problem.select is not no_time
    return build(Schedule, SPARSE_EXACT if schedule == EXACT and selects else schedule)


def speedups(
    trace: Trace, network_of: NetworkOf, methods: Methods, ways: Sequence[Way], workers: Iterable[int]
) -> Iterator[Row]:
    """Yield a row for every number of workers and way to train."""
    for world_size in workers:
        network = network_of(world_size)
        for method, group in itertools.groupby(ways, key=lambda way: way.method):
            problem = methods.problem(trace, network, method, world_size)
            for way in group:
                facts = {"workers": world_size, "method": method, "schedule": way.schedule}
                yield facts | simulate_step(problem, way.schedule, world_size)
