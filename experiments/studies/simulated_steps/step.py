"""One step of training, computed: from a trace of the model, the costs of a network, a method and a schedule."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from experiments.studies.simulated_steps.method_choices import Methods
from experiments.training.schedule_problem import group_volume
from micro.parts import build
from micro.planning.costs import Network
from micro.planning.nodes import NodeNetwork, level_bytes
from micro.planning.schedules.base import Ends, Problem, Schedule, no_time
from micro.planning.traces import Trace

Row = dict[str, Any]
NetworkOf = Callable[[int], Network]  # of a number of workers
EXACT, SPARSE_EXACT = "exact", "sparse_exact"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train: a method under a schedule."""

    method: str
    schedule: str


def simulate_step(problem: Problem, schedule: str, world_size: int) -> Row:
    """Return the numbers of one step under a schedule.

    Speed-up is over one worker, which neither sends nor selects: world_size * compute_s / step_s.
    """
    part = schedule_for(problem, schedule)
    return _row(problem, part, part.cut(problem), world_size)


def schedule_for(problem: Problem, schedule: str) -> Schedule:
    """Return the schedule of that name; the exact one is the one that knows of selection where there is any."""
    selects = problem.select is not no_time
    return build(Schedule, SPARSE_EXACT if schedule == EXACT and selects else schedule)


def simulate_levels(trace: Trace, network: NodeNetwork, methods: Methods, method: str, levels: str) -> Row:
    """Return the numbers of one step of a method in ``one`` level or ``two``, under its exact plan.

    ``within_bytes`` and ``between_bytes`` are those that a worker sends in a step, within its node and to other nodes,
    as means over the workers.
    """
    if levels == "one":
        reducer, problem = methods.reducers[method], methods.problem(trace, network, method, network.world_size)
    else:
        reducer = methods.two_level(method, network.ranks_per_node)
        problem = methods.two_level_problem(trace, network, method)
    schedule = schedule_for(problem, EXACT)
    ends, size = schedule.cut(problem), problem.trace.element_bytes
    groups = [problem.num_bytes(start, stop) for start, stop in pairwise((0, *ends))]
    volumes = [group_volume(reducer, round(sent / size), network.world_size, size) for sent in groups]
    within, between = zip(*(level_bytes(volume, network) for volume in volumes), strict=True)
    row = _row(problem, schedule, ends, network.world_size)
    return row | {"within_bytes": sum(within), "between_bytes": sum(between)}


def _row(problem: Problem, part: Schedule, ends: Ends, world_size: int) -> Row:
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
