"""Exponential, Pareto and gamma distributions, fitted to magnitudes by moments; their quantiles are thresholds."""

import math
from typing import Literal

import torch
from torch import Tensor

Law = Literal["exponential", "gamma", "pareto"]
CHUNK = 1 << 18  # entries that a CPU sums at a time: they fit in the cache


def log_moments(x: Tensor) -> tuple[int, float, float]:
    """Return the number, the mean and the mean logarithm of the magnitudes of ``x`` (numel,) that are not zero."""
    chunks = x.split(CHUNK) if x.device.type == "cpu" else (x,)
    size, total, log_total = torch.stack(list(map(_log_sums, chunks))).sum(0).tolist()  # host sync: the threshold
    return (int(size), total / size, log_total / size) if size else (0, 0.0, 0.0)


def _log_sums(chunk: Tensor) -> Tensor:
    magnitudes = chunk.abs().double()
    logarithms = magnitudes.log().clamp_(min=-1e4)  # finite for zeros, which the next line drops
    log_total = (logarithms * (magnitudes > 0)).sum()
    return torch.stack([magnitudes.count_nonzero().double(), magnitudes.sum(), log_total])


def quantile(law: Law, mean: float, variance: float, mean_log: float, density: float) -> float:
    """Return the value that a law with these moments exceeds with probability ``density``; 0 if all are zero."""
    if not mean > 0:
        return 0.0
    if law == "gamma":
        return gamma_quantile(mean, mean_log, density)
    return exponential_quantile(mean, density) if law == "exponential" else pareto_quantile(mean, variance, density)


def exponential_quantile(mean: float, density: float) -> float:
    """Return the value that an exponential distribution exceeds with probability ``density``."""
    return -mean * math.log(density)


def pareto_quantile(mean: float, variance: float, density: float) -> float:
    """Return the value that a generalised Pareto distribution exceeds with probability ``density``.

    Fitted by moments, shape = (1 - mean^2 / variance) / 2 < 1/2. Shape 0 is the exponential law; without variance the
    threshold is the mean.
    """
    ratio = mean * mean / variance if variance > 0 else math.inf
    if math.isinf(ratio):
        return mean
    bend, scale = (ratio - 1) / 2, mean * (ratio + 1) / 2  # bend = -shape
    return scale * (-math.expm1(bend * math.log(density)) / bend if bend else -math.log(density))


def gamma_quantile(mean: float, mean_log: float, density: float) -> float:
    """Return the value that a gamma distribution exceeds with probability ``density``.

    The shape is a closed-form approximation of maximum likelihood (Minka, 2002); without spread the threshold is the
    mean.
    """
    spread = math.log(mean) - mean_log
    if not spread > 1e-12:
        return mean
    shape = (3 - spread + math.sqrt((spread - 3) ** 2 + 24 * spread)) / (12 * spread)
    return mean / shape * _standard_gamma_quantile(shape, density)


def _standard_gamma_quantile(shape: float, density: float) -> float:
    """Invert the upper incomplete gamma function, by ten refinements into 64 intervals."""
    if density >= 1:
        return 0.0
    excess = -math.log(density)
    low, high = 0.0, shape + math.sqrt(2 * shape * excess) + excess  # Chernoff's bound on the quantile
    for _ in range(10):
        grid = torch.linspace(low, high, 65, dtype=torch.float64)
        beyond = torch.special.gammaincc(torch.full_like(grid, shape), grid)
        place = min(int((beyond > density).sum()), 64)
        low, high = float(grid[max(place - 1, 0)]), float(grid[place])
    return (low + high) / 2
