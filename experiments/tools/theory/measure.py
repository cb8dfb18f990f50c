"""Record accumulators (gradient + residual) of a training with top-k, and check the theory on them.

Source: Shi, Chu, Cheung and See, arXiv 1911.08772.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import micro
from experiments.planning import theory
from experiments.tools.shared.methods import build_methods
from experiments.tools.shared.recorded_gradients import Training, training_config
from experiments.tools.shared.selection_times import TIMES, reference_times, time_selection, timing_gradient
from micro.kernels import preparing

NUM_SHARES = 200
NUM_HISTOGRAM_BINS = 81
NUM_CURVE_POINTS = 400
SPAN = 8.0  # standard deviations that the histogram shows
OPERATORS = ("topk", "gaussiank", "gaussiank_published", "dgc", "sidco", "micro")


def accumulators(
    overrides: list[str], world_size: int, reducer: micro.Reducer, steps: Sequence[int]
) -> dict[str, Tensor]:
    """Train with a method; return rank 0's gradient + residual (d,) at each of ``steps``, by name."""
    vectors = {}
    training = Training(training_config(overrides, world_size), reducer=reducer)
    residual = torch.zeros(training.layout.numel)
    for step, rows in enumerate(training.steps(max(steps) + 1)):
        if step in steps:
            vectors[f"step {step}"] = rows[0] + residual
        if (kept := training.residual()).numel():
            residual.copy_(kept)
    return vectors


def check(values: Tensor) -> dict[str, Any]:
    """Return the numbers of a vector: the fitted normal, the assumption, and the error relative to the bound."""
    errors, values = error_numbers(values), values.double()
    ratios = errors["top_k"] / errors["bound"]
    worst = int(ratios.argmax())
    deviation = float(values.std(correction=0))
    fourth = float(((values - values.mean()) ** 4).mean())
    return {
        "numel": values.numel(),
        "mean": float(values.mean()),
        "deviation": deviation,
        "excess_kurtosis": fourth / deviation**4 - 3 if deviation else math.nan,
        "convex": theory.is_convex(values),
        "below_line": theory.is_below_line(values),
        "holds": bool(theory.bound_holds(values, torch.tensor(errors["share"].to_numpy())).all()),
        "worst_ratio": float(ratios.iloc[worst]),
        "worst_share": float(errors["share"].iloc[worst]),
    }


def error_numbers(values: Tensor) -> pd.DataFrame:
    """Return the errors of top-k, the bound and random-k at shares k/d from 1/d on.

    Columns share, top_k, bound, random_k.
    """
    numel = values.numel()
    counts = {round(numel**power) for power in torch.linspace(0, 1, NUM_SHARES).tolist()}
    counts |= {round(numel * part / NUM_SHARES) for part in range(1, NUM_SHARES)}
    shares = torch.tensor([k / numel for k in sorted(counts) if 0 < k < numel], dtype=torch.float64)
    errors = theory.top_k_error(values, shares), theory.top_k_bound(shares), theory.random_k_error(shares)
    return _frame(("share", "top_k", "bound", "random_k"), shares, *errors)


def curve_numbers(values: Tensor) -> pd.DataFrame:
    """Return the curve of squared, sorted, normalised magnitudes; columns share, pi_squared, line."""
    shares, curve = theory.pi_squared(values, min(values.numel(), 100_000))
    places = torch.logspace(0, math.log10(max(1, len(shares) - 1)), NUM_CURVE_POINTS).long().tolist()
    places = sorted({0, *places})
    return _frame(("share", "pi_squared", "line"), shares[places], curve[places], 1 - shares[places])


def histogram_numbers(values: Tensor) -> pd.DataFrame:
    """Return the density of values in standard deviations; columns value, density, normal (the fitted one)."""
    values = values.double()
    scaled = (values - values.mean()) / values.std(correction=0)
    counts, edges = torch.histogram(scaled, NUM_HISTOGRAM_BINS, range=(-SPAN, SPAN))
    centers = (edges[1:] + edges[:-1]) / 2
    fitted = torch.tensor([statistics.NormalDist().pdf(center) for center in centers.tolist()])
    measured = counts / (len(values) * 2 * SPAN / NUM_HISTOGRAM_BINS)
    return _frame(("value", "density", "normal"), centers, measured, fitted)


def operator_times(lengths: Sequence[int], density: float, world_size: int, repeats: int) -> pd.DataFrame:
    """Time the operators at each length, MiCRO on its slice of one in ``world_size``; method, numel, TIMES."""
    preparing.prepare()
    rows = []
    for numel in lengths:
        gradient = timing_gradient(numel, density)
        times = reference_times(gradient, density, repeats)
        for name, reducer in build_methods(OPERATORS, density).items():
            searched = gradient[: -(-numel // world_size)] if name == "micro" else gradient
            times[name] = time_selection(reducer, searched, repeats)
        rows += [{"method": name, "numel": numel} | found for name, found in times.items()]
    return pd.DataFrame(rows, columns=["method", "numel", *TIMES])


def _frame(names: Sequence[str], *columns: Tensor) -> pd.DataFrame:
    return pd.DataFrame({name: column.numpy() for name, column in zip(names, columns, strict=True)})
