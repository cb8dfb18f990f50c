"""The fit gaussiank: the threshold of a normal distribution with the accumulator's mean and deviation."""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor

from micro.kernels import sums_of
from micro.parts import NoState, Rule
from micro.selectors.base import Traits
from micro.selectors.estimated import CorrectedFit, Fit
from micro.selectors.fits.correction import strictly_above
from micro.values.sparse import Selection, Step

MAX_SCANS = 3
NARROWER, WIDER = 1.5, 0.5  # as published: factors for a threshold that selects too many, too few
FEWEST, MOST = 2 / 3, 4 / 3  # the scans stop at a count in this band around k


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianK(CorrectedFit):
    """Estimates the k-th magnitude by a normal distribution with the accumulator's mean and deviation.

    The pass that adds the gradient computes both; one scan follows.

    Source: Shi, Chu, Cheung and See, Understanding top-k sparsification in distributed deep learning, arXiv 1911.08772,
    and its public code. Differences: both tails count if the mean is not zero (code: the mean shifts one side only); a
    count outside [2/3, 4/3] k is corrected by a learned factor and an exact cut, instead of factors 0.5 and 1.5; the
    density is k / numel, and k is at least 1.
    """

    name: ClassVar[str] = "gaussiank"
    traits: ClassVar[Traits] = Traits.WANTS_SUMS

    def estimate(self, acc: Tensor, k: int, step: Step, rank: int) -> float:
        """Return the quantile of abs(acc) under the normal law."""
        sums = step.sums or sums_of(acc)
        deviation = math.sqrt(sums.variance) if sums.count > 1 else math.nan
        return folded_quantile(sums.mean, deviation, k / acc.numel())


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedGaussianK(Fit[NoState]):
    """Selects above a normal distribution's threshold, adjusted in up to three scans: the public code step for step.

    Kept from the code: the threshold is multiplied by 1.5 or 0.5 if the count leaves [2/3, 4/3] k; the last of three
    adjustments is computed but not used, so the count is unbounded; the mean shifts one side only; the comparison is
    strict, so a vector of zeros, or with one element, sends nothing. Source: as `GaussianK`. Differences: the last one
    of `GaussianK`.
    """

    name: ClassVar[str] = "gaussiank_published"
    rule: ClassVar[Rule] = "published"

    def select(self, state: NoState, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return this rank's indices above the threshold of the last scan."""
        mean = deviation = math.nan
        if acc.numel() > 1:
            deviation, mean = torch.stack(torch.std_mean(acc)).tolist()  # host sync: the threshold follows from them
        threshold = mean + deviation * normal_quantile(k / acc.numel())
        for _ in range(MAX_SCANS):
            used, (indices, _magnitudes) = threshold, strictly_above(acc, threshold)
            count = indices.numel()
            if FEWEST * k <= count <= MOST * k:
                break
            threshold *= WIDER if count < FEWEST * k else NARROWER
        return Selection(indices, threshold=used)


def normal_quantile(density: float) -> float:
    """Return the z that a standard normal variable exceeds in magnitude with probability ``density``, in (0, 1]."""
    return -NormalDist().inv_cdf(density / 2)


def folded_quantile(mean: float, deviation: float, density: float) -> float:
    """Return the threshold that the magnitude of a normal variable exceeds with probability ``density``, in (0, 1].

    Both tails count. NaN if mean or deviation is NaN.
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
