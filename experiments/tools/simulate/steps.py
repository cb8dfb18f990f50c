"""Compute one training step from a model's trace, a network, a method and a schedule."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from experiments.planning.schedules.base import Ends, Problem, Schedule, Timeline, no_time, timeline
from experiments.planning.traces import Layer, Trace
from micro.parts import build

Row = dict[str, Any]
EXACT, SPARSE_EXACT = "exact", "sparse_exact"


def planned(problem: Problem, schedule: str) -> tuple[Ends, Timeline]:
    """Return the groups and the step of a schedule; the exact one accounts for selection."""
    selects = problem.select is not no_time
    ends = build(Schedule, SPARSE_EXACT if schedule == EXACT and selects else schedule).cut(problem)
    return ends, timeline(problem, ends)


def simulate_step(problem: Problem, schedule: str, world_size: int) -> Row:
    """Return the numbers of one step under a schedule.

    Speed-up is relative to one worker, which neither sends nor selects: world_size * compute_s / step_s.
    """
    return numbers_of(problem, *planned(problem, schedule), world_size)


def numbers_of(problem: Problem, ends: Ends, step: Timeline, world_size: int) -> Row:
    """Return the numbers of one step with these groups."""
    return {
        "num_groups": len(ends),
        "step_s": step.step_s,
        "exposed_s": step.exposed_s,
        "select_s": step.backward_s - problem.trace.backward_s,
        "speedup": world_size * problem.trace.compute_s / step.step_s,
        "efficiency": problem.trace.compute_s / step.step_s,
    }


def crossing(gain: Callable[[float], float], low: float, high: float, halvings: int = 4) -> float:
    """Return the rate at which a falling gain is 1: by bisection of logarithms, then interpolation.

    0 if it is below 1 at ``low``, infinity if it is above 1 at ``high``.
    """
    above, below = math.log(gain(low)), math.log(gain(high))
    if below > 0:
        return math.inf
    if above <= 0:
        return 0.0
    for _ in range(halvings):
        middle = math.sqrt(low * high)
        found = math.log(gain(middle))
        if found > 0:
            low, above = middle, found
        else:
            high, below = middle, found
    return float(low * (high / low) ** (above / (above - below)))


def rescaled(trace: Trace, compute_s: float) -> Trace:
    """Return a trace scaled to ``compute_s`` seconds per step without communication."""
    factor = compute_s / trace.compute_s
    layers = tuple(
        replace(layer, ready_s=factor * layer.ready_s, used_s=None if layer.used_s is None else factor * layer.used_s)
        for layer in trace.layers
    )
    backward_s = max(factor * trace.backward_s, layers[-1].ready_s)
    forward_s, update_s = factor * trace.forward_s, factor * trace.update_s
    return replace(trace, layers=layers, forward_s=forward_s, backward_s=backward_s, update_s=update_s)


def by_layer(trace: Trace) -> Trace:
    """Return a trace that merges neighbouring parameters of one module."""
    layers = []
    for _, members in itertools.groupby(trace.layers, key=lambda layer: layer.name.rpartition(".")[0]):
        group = list(members)
        used = min((layer.used_s for layer in group if layer.used_s is not None), default=None)
        layers.append(Layer(group[0].name, sum(layer.num_bytes for layer in group), group[-1].ready_s, used))
    return replace(trace, layers=tuple(layers))


# The unit of sending: the parameters of a layer, or each parameter.
GRAINS: dict[str, Callable[[Trace], Trace]] = {"layer": by_layer, "tensor": lambda trace: trace}
