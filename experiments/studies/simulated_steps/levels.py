"""Each method in one level, all workers together, and in two: densely within a node, by the method between nodes."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Literal

import micro
from experiments.studies.simulated_steps.step import EXACT, Methods, Row, schedule_for, step_row
from experiments.training.schedule_problem import group_volume
from micro.planning.costs import Network
from micro.planning.nodes import NodeNetwork, level_bytes
from micro.planning.schedules.base import Ends, Problem
from micro.planning.traces import Trace

Levels = Literal["one", "two"]
LEVELS: tuple[Levels, ...] = ("one", "two")


def both_levels(
    trace: Trace, network_of: Callable[[int], Network], methods: Methods, workers: Iterable[int]
) -> Iterator[Row]:
    """Yield a row for every number of workers, method and number of levels, each under its exact plan.

    ``within_bytes`` and ``between_bytes`` are those that a worker sends in a step, within its node and to other nodes,
    as means over the workers.
    """
    for world_size in workers:
        network = network_of(world_size)
        assert isinstance(network, NodeNetwork), "without nodes there is one level"
        for method in methods.reducers:
            for levels in LEVELS:
                facts = {"workers": world_size, "ranks_per_node": network.ranks_per_node}
                yield facts | {"method": method, "levels": levels} | _row(trace, network, methods, method, levels)


def _row(trace: Trace, network: NodeNetwork, methods: Methods, method: str, levels: Levels) -> Row:
    if levels == "one":
        reducer, problem = methods.reducers[method], methods.problem(trace, network, method, network.world_size)
    else:
        reducer = methods.two_level(method, network.ranks_per_node)
        problem = methods.two_level_problem(trace, network, method)
    schedule = schedule_for(problem, EXACT)
    ends = schedule.cut(problem)
    within, between = _bytes(problem, ends, reducer, network)
    return step_row(problem, schedule, ends, network.world_size) | {"within_bytes": within, "between_bytes": between}


def _bytes(problem: Problem, ends: Ends, reducer: micro.Reducer, network: NodeNetwork) -> tuple[float, float]:
    """Return the bytes of a step within a node and between nodes, over all groups."""
    size = problem.trace.element_bytes
    groups = [problem.num_bytes(start, stop) for start, stop in pairwise((0, *ends))]
    volumes = [group_volume(reducer, round(sent / size), network.world_size, size) for sent in groups]
    each = [level_bytes(volume, network) for volume in volumes]
    return sum(within for within, _ in each), sum(between for _, between in each)
