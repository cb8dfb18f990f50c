"""Gaussian-k: the threshold that a normal distribution of the accumulator's mean and deviation would have."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.parts import Rule, check_rule
from micro.selectors.base import Selector
from micro.selectors.fitting import Correction, select_near, strictly_above
from micro.sparse import Selection, Step

ROUNDS = 3  # of the public code: scans at most
NARROWER, WIDER = 1.5, 0.5  # its factors on a threshold that selects too much, too little
FEWEST, MOST = 2 / 3, 4 / 3  # its band around k, where it stops


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianK(Selector[Correction]):
    """Select what a normal law, fitted by mean and standard deviation, says are the k largest magnitudes.

    Ranks fit and choose by themselves, so the union grows with their number (build-up). One pass for the statistics,
    one for the scan.

    Args:
        rule: 'repaired', the quantile of abs(acc) under the normal law, corrected by a factor learned from earlier
            steps and bounded by 4 k / 3: see micro.selectors.fitting; 'published', the public code step for step.

    Source: Shi, Chu, Cheung and See, Understanding top-k sparsification in distributed deep learning, arXiv 1911.08772,
    and its public code. Differences of 'repaired': both tails of the law count where the mean is not zero (the code
    lets the mean shift one side only), and a count outside of [2/3, 4/3] k is mended by a learned factor and an exact
    cut instead of the factors 0.5 and 1.5. Kept in 'published': these factors, and that the last of three adjustments
    is computed but not used, so that the count has no bound; the one-sided mean; the strict comparison, with which a
    vector of zeros, or of a single element, sends nothing. Both rules: the density is k / numel; k is at least 1.

    Raises:
        ValueError: no such rule.
    """

    rule: Rule = "repaired"
    name: ClassVar[str] = "gaussiank"

    def __post_init__(self) -> None:
        check_rule(self)

    def start(self) -> Correction:
        """Return a correction that has learned nothing yet; 'published' leaves it so."""
        return Correction()

    def load(self, saved: dict[str, Any]) -> Correction:
        """Return the state that ``save`` described."""
        return Correction(**saved)

    def select(self, state: Correction, acc: Tensor, step: Step, comm: Comm) -> Selection:
        """Return this rank's indices beyond its own threshold."""
        k = min(step.target_count, acc.numel())
        mean, deviation = _mean_and_deviation(acc)
        if self.rule == "published":
            return _refined(acc, mean + deviation * normal_quantile(k / acc.numel()), k)
        return select_near(state, acc, folded_quantile(mean, deviation, k / acc.numel()), k)


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


def _mean_and_deviation(acc: Tensor) -> tuple[float, float]:
    """Return mean and unbiased standard deviation, which is NaN for a single element."""
    if acc.numel() < 2:
        return math.nan, math.nan
    deviation, mean = torch.stack(torch.std_mean(acc)).tolist()  # host sync: the threshold follows from them
    return mean, deviation


def _refined(acc: Tensor, threshold: float, k: int) -> Selection:
    """Return what the public code's rounds end with."""
    for _ in range(ROUNDS):
        used, (indices, _magnitudes) = threshold, strictly_above(acc, threshold)
        count = indices.numel()
        if FEWEST * k <= count <= MOST * k:
            break
        threshold *= WIDER if count < FEWEST * k else NARROWER
    return Selection(indices, threshold=used)
