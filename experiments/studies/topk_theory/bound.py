"""The numbers of a vector: how near to a normal law it is, and whether the error of top-k keeps its bound.

Source: Shi, Chu, Cheung and See, arXiv 1911.08772.
"""

import math
import statistics
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from experiments.studies.topk_theory.accumulators import Vector
from micro.planning import theory

NUM_SHARES = 200
NUM_HISTOGRAM_BINS = 81
NUM_CURVE_POINTS = 400
SPAN = 8.0  # standard deviations that the histogram shows


def check(vector: Vector) -> dict[str, Any]:
    """Return the numbers of a vector: its fitted normal, its assumption, and how far its error is from the bound."""
    values, errors = vector.values.double(), error_numbers(vector)
    ratios = errors["top_k"] / errors["bound"]
    worst = int(ratios.argmax())
    deviation = float(values.std(correction=0))
    fourth = float(((values - values.mean()) ** 4).mean())
    return {
        "vector": vector.name,
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


def verdict(row: dict[str, Any]) -> str:
    """Return in words whether the bound holds in a row of ``check``."""
    how = "holds at every k/d checked" if row["holds"] else "is broken"
    return f"{how}, worst ratio {row['worst_ratio']:.4g} at k/d = {row['worst_share']:.3g}"


def error_numbers(vector: Vector) -> pd.DataFrame:
    """Return the errors of top-k, the bound and random-k at shares k/d from 1/d on.

    Columns vector, share, top_k, bound, random_k.
    """
    numel = vector.values.numel()
    counts = sorted({round(numel**power) for power in torch.linspace(0, 1, NUM_SHARES).tolist()})
    counts = sorted({*counts, *(round(numel * part / NUM_SHARES) for part in range(1, NUM_SHARES))})
    shares = torch.tensor([k / numel for k in counts if 0 < k < numel], dtype=torch.float64)
    columns = {
        "share": shares,
        "top_k": theory.top_k_error(vector.values, shares),
        "bound": theory.top_k_bound(shares),
        "random_k": theory.random_k_error(shares),
    }
    return _frame(vector, columns)


def curve_numbers(vector: Vector) -> pd.DataFrame:
    """Return the curve of squared, sorted, normalised magnitudes; columns vector, share, pi_squared, line."""
    shares, curve = theory.pi_squared(vector.values, min(vector.values.numel(), 100_000))
    places = torch.logspace(0, math.log10(max(1, len(shares) - 1)), NUM_CURVE_POINTS).long().tolist()
    places = sorted({0, *places})
    columns = {"share": shares[places], "pi_squared": curve[places], "line": theory.triangle_line(shares[places])}
    return _frame(vector, columns)


def histogram_numbers(vector: Vector) -> pd.DataFrame:
    """Return the density of values in standard deviations; columns vector, value, density, normal (the fitted one)."""
    values = vector.values.double()
    scaled = (values - values.mean()) / values.std(correction=0)
    counts, edges = torch.histogram(scaled, NUM_HISTOGRAM_BINS, range=(-SPAN, SPAN))
    centers = (edges[1:] + edges[:-1]) / 2
    fitted = [statistics.NormalDist().pdf(center) for center in centers.tolist()]
    measured = counts / (len(values) * 2 * SPAN / NUM_HISTOGRAM_BINS)
    return _frame(vector, {"value": centers, "density": measured, "normal": torch.tensor(fitted)})


def _frame(vector: Vector, columns: dict[str, Tensor]) -> pd.DataFrame:
    return pd.DataFrame({"vector": vector.name} | {name: column.numpy() for name, column in columns.items()})
