"""Steps of training that never ran: what traces, models of networks and schedules say of them."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

import micro
from experiments.config.errors import UserError
from experiments.training.schedule_problem import Selection, problem_of
from micro.parts import Rule, build
from micro.planning import costs
from micro.planning.costs import Network
from micro.planning.schedules.base import Problem, Schedule, no_time
from micro.planning.traces import Layer, Trace

Row = dict[str, Any]
NetworkOf = Callable[[int], Network]  # of a number of workers
DENSE = "dense"
EXACT, SPARSE_EXACT = "exact", "sparse_exact"

SORTED, SLICED = ("topk", "leader"), ("micro", "exdyna")  # a leader sorts while all others wait for it
SCANNED = ("reused", "threshold", "gaussiank", "dgc", "redsync", "sidco", "sage")
SORT_S = 2.18896957e-10  # s of s x log2(x) for the top-k of a P102-100, literal in the public code of OMGS-SGD
SCAN_BYTES, KEEP_BYTES = 4, 16  # read once to compare; residual + gradient, kept (12), and the gradient cleared (4)


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
        selection: of a number of workers.
    """

    reducers: Mapping[str, micro.Reducer]
    selection: Callable[[int], Selection]

    def problem(self, trace: Trace, network: Network, method: str, world_size: int) -> Problem:
        """Return what a schedule decides on for a method on so many workers."""
        reducer, select = self.reducers[method], self.selection(world_size)
        return problem_of(trace, network, reducer, world_size, select=select, method=method)

    @property
    def sparse(self) -> list[str]:
        """The methods that are not the baseline."""
        return [name for name in self.reducers if name != DENSE]


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """Seconds of selection where nobody measured them: memory traffic, and for an exact top-k the known s x log2(x).

    Every method adds the residual and clears the gradient, 16 bytes an element; one with a threshold reads all of it
    once more, 4 bytes, one with exclusive slices reads a share of 1 in ``world_size``. Starting a kernel costs nothing.

    Attributes:
        selectors: the name of each method's selector.
        bytes_per_s: of memory, assumed.
    """

    selectors: dict[str, str]
    world_size: int
    bytes_per_s: float

    def __post_init__(self) -> None:
        for method, selector in self.selectors.items():
            if selector not in (*SORTED, *SLICED, *SCANNED):
                known = ", ".join((*SORTED, *SLICED, *SCANNED))
                raise UserError(
                    f"no formula for the selection of {method} ({selector}), only for {known}: measure it with "
                    "'python -m experiments.profile select' and give --select FILE"
                )

    def seconds(self, method: str, numel: float) -> float:
        """Return the seconds that a method takes for ``numel`` elements."""
        kept_s = KEEP_BYTES * numel / self.bytes_per_s
        if self.selectors[method] in SORTED:
            return kept_s + SORT_S * numel * math.log2(max(numel, 2))
        share = self.world_size if self.selectors[method] in SLICED else 1
        return kept_s + SCAN_BYTES * numel / share / self.bytes_per_s


def simulate(problem: Problem, schedule: str, world_size: int) -> Row:
    """Return the numbers of one step under a schedule.

    Speed-up is over one worker, which neither sends nor selects: world_size * compute_s / step_s.
    """
    part = schedule_for(problem, schedule)
    ends = part.cut(problem)
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
                yield facts | simulate(problem, way.schedule, world_size)


def borders(
    trace: Trace, link: costs.Link, methods: Methods, workers: Iterable[int], rates: tuple[float, float]
) -> Iterator[Row]:
    """Yield, for every method and number of workers, up to which rate its step is shorter than that of dense.

    Both under their exact plans, over a ring. The border is 0 where the method never gains, infinite where it still
    does at the highest rate.

    Args:
        link: gives the start-up of a message; what a byte takes follows from the rate.
        rates: the lowest and the highest, in bits per second.
    """
    for world_size in workers:

        @cache
        def step_s(method: str, rate: float, world_size: int = world_size) -> float:
            network = costs.Flat(replace(link, beta_s=8 / rate), world_size)
            problem = methods.problem(trace, network, method, world_size)
            return float(simulate(problem, EXACT, world_size)["step_s"])

        for method in methods.sparse:
            border = crossing(lambda rate, method=method: step_s(DENSE, rate) / step_s(method, rate), *rates)  # type: ignore[misc]
            yield {"workers": world_size, "method": method, "border": border}


def crossing(gain: Callable[[float], float], low: float, high: float, halvings: int = 4) -> float:
    """Return where a gain that falls with the rate is 1: by halving between logarithms, then by a line.

    0 where it is below 1 at ``low``, infinity where it is above 1 at ``high``.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a paper says of a model: how much faster its schedule is than the two others at 64 workers."""

    over_layerwise: float
    over_single: float


# Shi, Chu and Li, MG-WFBP, TPDS 2021 (arXiv 1912.09268), section 6: simulated, 64 workers, ring, K80 on 10 Gbit/s.
PUBLISHED = {
    "googlenet": Published(over_layerwise=1.78, over_single=1.35),
    "resnet50": Published(over_layerwise=1.75, over_single=1.45),
}
PUBLISHED_WORKERS = 64
CLUSTER_ALPHA_S, CLUSTER_BETA_S = 9.72e-4, 1.97e-9  # the fit of its cluster 1, figure 4
FITTED_AT = (16, 8)  # ranks of that fit: 8 nodes of 2 GPUs, and the paper does not say which of the two it was
READINGS = tuple(itertools.product(("layer", "tensor"), FITTED_AT))  # how a layer is sent, and of how many the fit is
SLOPES: dict[str, Rule] = {"beta + gamma (published)": "published", "2 beta + gamma": "repaired"}


def trees(trace: Trace, schedules: Sequence[str], workers: Iterable[int]) -> Iterator[Row]:
    """Yield the speed-ups of dense schedules with double trees on the paper's cluster, under both slopes."""
    link, reducer = cluster_link(), micro.DenseReducer()
    for world_size, (slope, rule) in itertools.product(workers, SLOPES.items()):
        problem = problem_of(trace, costs.Flat(link, world_size, "double_tree", rule), reducer, world_size)
        for schedule in schedules:
            facts = {"slope": slope, "workers": world_size, "schedule": schedule}
            yield facts | simulate(problem, schedule, world_size)


def cluster_link(fitted_at: int = FITTED_AT[0]) -> costs.Link:
    """Return the paper's link, for a number of ranks of its fit."""
    return costs.scaled(CLUSTER_ALPHA_S, CLUSTER_BETA_S, fitted_at, "ring")


def ratios(trace: Trace, fitted_at: int, compute_s: float, world_size: int = PUBLISHED_WORKERS) -> Row:
    """Return how much faster the merged schedule is than layer by layer and than one bucket, on the paper's cluster."""
    network = costs.Flat(cluster_link(fitted_at), world_size, "ring")
    problem = problem_of(rescaled(trace, compute_s), network, micro.DenseReducer(), world_size)
    steps = {name: simulate(problem, name, world_size)["step_s"] for name in ("layerwise", "single", "mgwfbp")}
    return {
        "over_layerwise": steps["layerwise"] / steps["mgwfbp"],
        "over_single": steps["single"] / steps["mgwfbp"],
    }


def headline(trace: Trace, computes: Sequence[float], readings: Sequence[tuple[str, int]] = READINGS) -> Iterator[Row]:
    """Yield those ratios over assumed times of a step's computation, for each reading of what the paper leaves open.

    Forward is taken as half of backward, as in the authors' script.
    """
    for (grain, fitted_at), compute_s in itertools.product(readings, computes):
        sent = as_published(GRAINS[grain](trace))
        facts = {"grain": grain, "fitted_at": fitted_at, "num_sent": len(sent.layers), "compute_s": compute_s}
        yield facts | ratios(sent, fitted_at, compute_s)


def nearest(rows: Sequence[Row], published: Published) -> Row:
    """Return the row whose two ratios are nearest to the published ones, in relative terms."""

    def distance(row: Row) -> float:
        return math.log(row["over_layerwise"] / published.over_layerwise) ** 2 + (
            math.log(row["over_single"] / published.over_single) ** 2
        )

    return min(rows, key=distance)


def rescaled(trace: Trace, compute_s: float) -> Trace:
    """Return a trace whose step without communication takes so long, its proportions kept."""
    factor = compute_s / trace.compute_s
    layers = tuple(
        replace(layer, ready_s=factor * layer.ready_s, used_s=None if layer.used_s is None else factor * layer.used_s)
        for layer in trace.layers
    )
    backward_s = max(factor * trace.backward_s, layers[-1].ready_s)
    forward_s, update_s = factor * trace.forward_s, factor * trace.update_s
    return replace(trace, layers=layers, forward_s=forward_s, backward_s=backward_s, update_s=update_s)


def as_published(trace: Trace) -> Trace:
    """Return a trace whose forward takes half as long as backward and whose update takes no time."""
    return replace(trace, forward_s=trace.backward_s / 2, update_s=0.0)


def by_layer(trace: Trace) -> Trace:
    """Return a trace in which the parameters of one module, neighbours in backward order, are one."""
    layers = []
    for _, members in itertools.groupby(trace.layers, key=lambda layer: layer.name.rpartition(".")[0]):
        group = list(members)
        used = [layer.used_s for layer in group if layer.used_s is not None]
        num_bytes = sum(layer.num_bytes for layer in group)
        layers.append(Layer(group[0].name, num_bytes, group[-1].ready_s, min(used, default=None)))
    return replace(trace, layers=tuple(layers))


def spread(lowest: float, highest: float, per_decade: int) -> list[float]:
    """Return values of equal ratios, so many to a decade, both ends among them."""
    count = round(math.log10(highest / lowest) * per_decade) + 1
    return [float(value) for value in np.geomspace(lowest, highest, count)]


def by_tensor(trace: Trace) -> Trace:
    """Return the trace as it is: each parameter for itself."""
    return trace


# What cannot be parted: the parameters of a layer, or each for itself.
GRAINS: dict[str, Callable[[Trace], Trace]] = {"layer": by_layer, "tensor": by_tensor}
