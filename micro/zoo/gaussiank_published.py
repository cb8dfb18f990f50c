"""Gaussian-k as in its public code: the normal law's threshold, adjusted in up to three scans."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.parts import NoState, Rule
from micro.selectors.estimated import Fit
from micro.selectors.fits.correction import strictly_above
from micro.selectors.fits.gaussiank import normal_quantile
from micro.sparse import Selection, Step

MAX_SCANS = 3
NARROWER, WIDER = 1.5, 0.5  # factors on a threshold that selects too much, too little
FEWEST, MOST = 2 / 3, 4 / 3  # the scans stop at a count in this band around k


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedGaussianK(Fit[NoState]):
    """What is beyond a normal law's threshold, adjusted in up to three scans: the public code step for step.

    What is kept of the code: the threshold is multiplied by 1.5 or 0.5 where the count leaves [2/3, 4/3] k; the last of
    three adjustments is computed but not used, so that the count has no bound; the mean shifts one side only; the
    comparison is strict, so that a vector of zeros, or of a single element, sends nothing.

    Source: Shi, Chu, Cheung and See, Understanding top-k sparsification in distributed deep learning, arXiv 1911.08772,
    and its public code. Differences: the density is k / numel, and k is at least 1.
    """

    name: ClassVar[str] = "gaussiank_published"
    rule: ClassVar[Rule] = "published"

    def select(self, state: NoState, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return this rank's indices beyond the threshold of the last scan."""
        mean, deviation = _mean_and_deviation(acc)
        threshold = mean + deviation * normal_quantile(k / acc.numel())
        for _ in range(MAX_SCANS):
            used, (indices, _magnitudes) = threshold, strictly_above(acc, threshold)
            count = indices.numel()
            if FEWEST * k <= count <= MOST * k:
                break
            threshold *= WIDER if count < FEWEST * k else NARROWER
        return Selection(indices, threshold=used)


def _mean_and_deviation(acc: Tensor) -> tuple[float, float]:
    """Return mean and unbiased standard deviation of ``acc`` (numel,); NaN for a single element."""
    if acc.numel() < 2:
        return math.nan, math.nan
    deviation, mean = torch.stack(torch.std_mean(acc)).tolist()  # host sync: the threshold follows from them
    return mean, deviation
