"""Gains of merged gradients that a paper publishes, beside ours on its cluster, and double trees on its link.

Source: Shi, Chu and Li, MG-WFBP, TPDS 2021, arXiv 1912.09268, section 6.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import micro
from experiments.studies.simulated_steps.step import Row, simulate_step
from experiments.studies.simulated_steps.trace_changes import GRAINS, as_published, rescaled
from experiments.training.schedule_problem import problem_of
from micro.planning import costs
from micro.planning.costs import Link
from micro.planning.traces import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Published gains of a model: how much faster the paper's schedule is than the two others at 64 workers."""

    over_layerwise: float
    over_single: float


# Shi, Chu and Li, MG-WFBP, TPDS 2021 (arXiv 1912.09268), section 6: simulated, 64 workers, ring, K80 on 10 Gbit/s.
PUBLISHED = {
    "googlenet": Published(over_layerwise=1.78, over_single=1.35),
    "resnet50": Published(over_layerwise=1.75, over_single=1.45),
}
PUBLISHED_WORKERS = 64
CLUSTER_ALPHA_S, CLUSTER_BETA_S = 9.72e-4, 1.97e-9  # the fit of its cluster 1, figure 4
FITTED_AT = (16, 8)  # ranks of that fit: 8 nodes of 2 GPUs, and the paper does not say which
READINGS = tuple(itertools.product(("layer", "tensor"), FITTED_AT))  # how a layer is sent, and of how many the fit is
SLOPES = {"beta + gamma (published)": costs.PUBLISHED_TREE, "2 beta + gamma": "double_tree"}


def spread(lowest: float, highest: float, per_decade: int) -> list[float]:
    """Return values of equal ratios, so many to a decade, both ends among them."""
    count = round(math.log10(highest / lowest) * per_decade) + 1
    return [float(value) for value in np.geomspace(lowest, highest, count)]


COMPUTES = spread(0.03, 10.0, per_decade=16)  # seconds of a step that are assumed in turn


def headline(trace: Trace, computes: Sequence[float], readings: Sequence[tuple[str, int]] = READINGS) -> Iterator[Row]:
    """Yield those ratios over assumed times of a step's computation, for each reading of what the paper leaves open.

    Forward is taken as half of backward, as in the authors' script.
    """
    for (grain, fitted_at), compute_s in itertools.product(readings, computes):
        sent = as_published(GRAINS[grain](trace))
        facts = {"grain": grain, "fitted_at": fitted_at, "num_sent": len(sent.layers), "compute_s": compute_s}
        yield facts | ratios(sent, fitted_at, compute_s)


def ratios(trace: Trace, fitted_at: int, compute_s: float, world_size: int = PUBLISHED_WORKERS) -> Row:
    """Return how much faster the merged schedule is than layer by layer and than one bucket, on the paper's cluster."""
    network = costs.Flat(cluster_link(fitted_at), world_size, "ring")
    problem = problem_of(rescaled(trace, compute_s), network, micro.DenseReducer(), world_size)
    steps = {name: simulate_step(problem, name, world_size)["step_s"] for name in ("layerwise", "single", "mgwfbp")}
    return {
        "over_layerwise": steps["layerwise"] / steps["mgwfbp"],
        "over_single": steps["single"] / steps["mgwfbp"],
    }


def nearest(rows: Sequence[Row], published: Published) -> Row:
    """Return the row whose two ratios are nearest to the published ones, in relative terms."""

    def distance(row: Row) -> float:
        return math.log(row["over_layerwise"] / published.over_layerwise) ** 2 + (
            math.log(row["over_single"] / published.over_single) ** 2
        )

    return min(rows, key=distance)


def trees(trace: Trace, schedules: Sequence[str], workers: Iterable[int]) -> Iterator[Row]:
    """Yield the speed-ups of dense schedules with double trees on the paper's cluster, under both slopes."""
    link, reducer = cluster_link(), micro.DenseReducer()
    for world_size, (slope, algorithm) in itertools.product(workers, SLOPES.items()):
        problem = problem_of(trace, costs.Flat(link, world_size, algorithm), reducer, world_size)
        for schedule in schedules:
            facts = {"slope": slope, "workers": world_size, "schedule": schedule}
            yield facts | simulate_step(problem, schedule, world_size)


def cluster_link(fitted_at: int = FITTED_AT[0]) -> Link:
    """Return the paper's link, for a number of ranks of its fit."""
    return costs.scaled(CLUSTER_ALPHA_S, CLUSTER_BETA_S, fitted_at, "ring")
