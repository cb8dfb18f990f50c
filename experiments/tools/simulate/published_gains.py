"""Compare a paper's published gains of merged gradients with our simulation of its cluster.

Source: Shi, Chu and Li, MG-WFBP, TPDS 2021, arXiv 1912.09268, section 6: simulated, 64 workers, ring, K80 on 10 Gbit/s.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

import micro
from experiments.planning.costs import Flat, Link, scaled
from experiments.planning.problem import problem_of
from experiments.planning.traces import Trace
from experiments.tools.simulate.steps import GRAINS, Row, rescaled, simulate_step


class Published(NamedTuple):
    """How much faster the paper's schedule is than the two others at 64 workers."""

    over_layerwise: float
    over_single: float


PUBLISHED = {
    "googlenet": Published(over_layerwise=1.78, over_single=1.35),
    "resnet50": Published(over_layerwise=1.75, over_single=1.45),
}
PUBLISHED_WORKERS = 64
CLUSTER_ALPHA_S, CLUSTER_BETA_S = 9.72e-4, 1.97e-9  # the paper's fit of cluster 1, figure 4
FITTED_AT = (16, 8)  # ranks of that fit: the paper has 8 nodes of 2 GPUs, and does not say which number it means
READINGS = tuple(itertools.product(("layer", "tensor"), FITTED_AT))  # unit of sending, and ranks of the fit
COMPUTES = [float(s) for s in np.geomspace(0.03, 10.0, 41)]  # assumed seconds of computation per step


def headline(trace: Trace, readings: Sequence[tuple[str, int]] = READINGS) -> Iterator[Row]:
    """Yield our gains over assumed computation times, for each interpretation of the paper's open details.

    Forward takes half the time of backward and the update none, as in the authors' script.
    """
    for (grain, fitted_at), compute_s in itertools.product(readings, COMPUTES):
        sent = replace(GRAINS[grain](trace), forward_s=trace.backward_s / 2, update_s=0.0)
        facts = {"grain": grain, "fitted_at": fitted_at, "num_sent": len(sent.layers), "compute_s": compute_s}
        yield facts | ratios(sent, fitted_at, compute_s)


def ratios(trace: Trace, fitted_at: int, compute_s: float) -> Row:
    """Return the speed-ups of the merged schedule over layer by layer and over one bucket, on the paper's cluster."""
    network = Flat(cluster_link(fitted_at), PUBLISHED_WORKERS)
    problem = problem_of(rescaled(trace, compute_s), network, micro.DenseReducer())
    names = ("layerwise", "single", "mgwfbp")
    layerwise, single, merged = (simulate_step(problem, name, PUBLISHED_WORKERS)["step_s"] for name in names)
    return {"over_layerwise": layerwise / merged, "over_single": single / merged}


def nearest(rows: Sequence[Row], published: Published) -> Row:
    """Return the row whose two ratios are nearest to the published ones, in relative terms."""
    names = published._fields
    return min(rows, key=lambda row: sum(math.log(row[name] / getattr(published, name)) ** 2 for name in names))


def cluster_link(fitted_at: int = FITTED_AT[0]) -> Link:
    """Return the paper's link, if its fit is for ``fitted_at`` ranks."""
    return scaled(CLUSTER_ALPHA_S, CLUSTER_BETA_S, fitted_at)
