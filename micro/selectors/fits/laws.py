"""Laws with a peak at zero, fitted to magnitudes by their moments, and the quantiles that serve as thresholds."""

import math
from typing import Literal

import torch
from torch import Tensor

Law = Literal["exponential", "gamma", "pareto"]
CHUNK = 1 << 18  # entries that a CPU sums up at a time: they stay in the cache


def moments(x: Tensor, *, logs: bool = False) -> tuple[int, float, float, float]:
    """Return size, mean and unbiased variance of abs(x) (numel,), and the mean of its logarithm, in double precision.

    Args:
        logs: leave zeros out, and compute the mean logarithm, which is 0 otherwise.
    """
    chunks = x.split(CHUNK) if x.device.type == "cpu" else (x,)
    sums = torch.stack([_sums(chunk, logs) for chunk in chunks]).sum(0)
    size, total, squares, log_total = sums.tolist()  # host sync: the threshold follows from them
    if not size:
        return 0, 0.0, 0.0, 0.0
    mean = total / size
    variance = (squares - total * mean) / (size - 1) if size > 1 else 0.0
    return int(size), mean, variance, log_total / size


def _sums(chunk: Tensor, logs: bool) -> Tensor:
    magnitudes = chunk.abs().double()
    if not logs:
        size = torch.full((), chunk.numel(), dtype=torch.float64, device=chunk.device)
        return torch.stack([size, magnitudes.sum(), magnitudes.dot(magnitudes), torch.zeros_like(size)])
    size = magnitudes.count_nonzero().double()
    logarithms = magnitudes.log().clamp_(min=-1e4)  # of a zero: left out by the next line
    return torch.stack([size, magnitudes.sum(), magnitudes.dot(magnitudes), (logarithms * (magnitudes > 0)).sum()])


def quantile(law: Law, mean: float, variance: float, mean_log: float, density: float) -> float:
    """Return what a variable of this law and these moments exceeds with probability ``density``; 0 if all are zero."""
    if not mean > 0:
        return 0.0
    if law == "gamma":
        return gamma_quantile(mean, mean_log, density)
    return exponential_quantile(mean, density) if law == "exponential" else pareto_quantile(mean, variance, density)


def exponential_quantile(mean: float, density: float) -> float:
    """Return what an exponential variable of this mean exceeds with probability ``density``."""
    return -mean * math.log(density)


def pareto_quantile(mean: float, variance: float, density: float) -> float:
    """Return what a generalised Pareto variable of this mean and variance exceeds with probability ``density``.

    Fitted by moments, shape = (1 - mean^2 / variance) / 2 < 1/2. Shape 0 is the exponential law; without variance the
    threshold is the mean.
    """
    ratio = mean * mean / variance if variance > 0 else math.inf
    if math.isinf(ratio):
        return mean
    bend, scale = (ratio - 1) / 2, mean * (ratio + 1) / 2  # bend = -shape
    return scale * (-math.expm1(bend * math.log(density)) / bend if bend else -math.log(density))


def gamma_quantile(mean: float, mean_log: float, density: float) -> float:
    """Return what a gamma variable of this mean and mean logarithm exceeds with probability ``density``.

    The shape is the closed form near the likelihood's maximum (Minka, 2002); without spread the threshold is the mean.
    """
    spread = math.log(mean) - mean_log
    if not spread > 1e-12:
        return mean
    shape = (3 - spread + math.sqrt((spread - 3) ** 2 + 24 * spread)) / (12 * spread)
    return mean / shape * _standard_gamma_quantile(shape, density)


def _standard_gamma_quantile(shape: float, density: float) -> float:
    """Invert the upper incomplete gamma function: ten times the right one of 64 intervals."""
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
