"""Gaussian-k: the threshold that a normal distribution of the accumulator's mean and deviation would have."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.kernels.sums import Sums, sums_of
from micro.requests import Reduction
from micro.selectors.base import Selector
from micro.selectors.fitting import Correction, select_near
from micro.sparse import Selection, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianK(Selector[Correction]):
    """Select what a normal law, fitted by mean and standard deviation, says are the k largest magnitudes.

    The threshold is the quantile of abs(acc) under the normal law, times a factor learned from earlier steps; at most
    4 k / 3 indices are selected (micro.selectors.fitting). Each rank fits and selects on its own, so the union grows
    with the number of ranks (build-up). The statistics come with the pass that adds the gradient; one scan follows.

    Source: Shi, Chu, Cheung and See, Understanding top-k sparsification in distributed deep learning, arXiv 1911.08772,
    and its public code. Differences: both tails of the law count where the mean is not zero (the code lets the mean
    shift one side only); a count outside [2/3, 4/3] k is corrected by a learned factor and an exact cut instead of the
    factors 0.5 and 1.5; the density is k / numel, and k is at least 1. `PublishedGaussianK` follows the public code.
    """

    name: ClassVar[str] = "gaussiank"
    rule: ClassVar[str] = "repaired"
    wants_sums: ClassVar[bool] = True

    def start(self) -> Correction:
        """Return a correction that has learned nothing yet."""
        return Correction()

    def select(self, state: Correction, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Fit, and return near k."""
        yield from ()
        k = min(step.target_count, acc.numel())
        return select_near(state, acc, _fitted(step.sums or sums_of(acc), k / acc.numel()), k)


def _fitted(sums: Sums, density: float) -> float:
    """Return the threshold of the normal law of these sums."""
    deviation = math.sqrt(sums.variance) if sums.count > 1 else math.nan
    return folded_quantile(sums.mean, deviation, density)


def normal_quantile(density: float) -> float:
    """Return the z that a standard normal variable exceeds in magnitude with probability ``density``, in (0, 1]."""
    from statistics import NormalDist  # here: it imports fractions and decimals, which nothing else needs

    return -NormalDist().inv_cdf(density / 2)


def folded_quantile(mean: float, deviation: float, density: float) -> float:
    """Return the threshold that the magnitude of a normal variable exceeds with probability ``density``, in (0, 1].

    Both tails count. NaN where mean or deviation is.
    """
    if not deviation > 0:
        return abs(mean) + deviation
    shift, unit = abs(mean), deviation * math.sqrt(2)
    low, high = 0.0, shift + deviation * normal_quantile(density)
    for _ in range(60):  # halvings: down to the last bit
        middle = (low + high) / 2
        beyond = (math.erfc((middle - shift) / unit) + math.erfc((middle + shift) / unit)) / 2
        low, high = (middle, high) if beyond > density else (low, middle)
    return high


def mean_and_deviation(acc: Tensor) -> tuple[float, float]:
    """Return mean and unbiased standard deviation of ``acc`` (numel,); NaN for a single element."""
    if acc.numel() < 2:
        return math.nan, math.nan
    deviation, mean = torch.stack(torch.std_mean(acc)).tolist()  # host sync: the threshold follows from them
    return mean, deviation
