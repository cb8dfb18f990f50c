"""Gaussian-k: the threshold that a normal distribution of the accumulator's mean and deviation would have."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.kernels.sums import AnySums, UnreadSums, soonest_sums_of
from micro.selectors.asking import Asking
from micro.selectors.fitting import Correction, Estimating, choosing_near
from micro.sparse import Selection, Step

PLACES = 1 << 13  # at which a device looks at the law, twice: the threshold is then good to 2^-26 of the largest


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianK(Estimating[Correction]):
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

    def choosing(self, state: Correction, acc: Tensor, step: Step, comm: Comm) -> Asking[Selection]:
        """Fit, and choose near k; see Selector."""
        k = min(step.target_count, acc.numel())
        guess = _fitted(step.sums or soonest_sums_of(acc), k / acc.numel())
        return (yield from choosing_near(state, acc, guess, k, step, comm))


def _fitted(sums: AnySums, density: float) -> float | Tensor:
    """Return the threshold of the normal law of these sums."""
    if isinstance(sums, UnreadSums):
        return unread_quantile(sums.mean, sums.variance.sqrt(), density)
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


def unread_quantile(mean: Tensor, deviation: Tensor, density: float) -> Tensor:
    """Do what `folded_quantile` does with tensors () float64, as near as float32 can tell; no host reads them."""
    shift, unit = mean.abs(), deviation * math.sqrt(2)
    low, width = torch.zeros_like(shift), shift + deviation * normal_quantile(density)
    places = torch.linspace(0, 1, PLACES + 1, dtype=torch.float64, device=mean.device)
    for _ in range(2):
        middles = low + width * places
        beyond = (torch.erfc((middles - shift) / unit) + torch.erfc((middles + shift) / unit)) / 2
        width = width / PLACES
        low = low + width * ((beyond[1:] > density).sum())
    return (low + width).where(deviation > 0, shift + deviation)


def mean_and_deviation(acc: Tensor) -> tuple[float, float]:
    """Return mean and unbiased standard deviation of ``acc`` (numel,); NaN for a single element."""
    if acc.numel() < 2:
        return math.nan, math.nan
    deviation, mean = torch.stack(torch.std_mean(acc)).tolist()  # host sync: the threshold follows from them
    return mean, deviation
