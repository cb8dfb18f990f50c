"""Gaussian-k as in its public code: the normal law's threshold, adjusted in up to three scans."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro.comm import Comm
from micro.requests import Reduction
from micro.selectors.base import NoState, Selector
from micro.selectors.fitting import strictly_above
from micro.selectors.gaussiank import mean_and_deviation, normal_quantile
from micro.sparse import Selection, Step

MAX_SCANS = 3
NARROWER, WIDER = 1.5, 0.5  # factors on a threshold that selects too much, too little
FEWEST, MOST = 2 / 3, 4 / 3  # the scans stop at a count in this band around k


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedGaussianK(Selector[NoState]):
    """Select beyond a normal law's threshold, adjusted in up to three scans: the public code step for step.

    What is kept of the code: the threshold is multiplied by 1.5 or 0.5 where the count leaves [2/3, 4/3] k; the last of
    three adjustments is computed but not used, so that the count has no bound; the mean shifts one side only; the
    comparison is strict, so that a vector of zeros, or of a single element, sends nothing.

    Source: Shi, Chu, Cheung and See, Understanding top-k sparsification in distributed deep learning, arXiv 1911.08772,
    and its public code. Differences: the density is k / numel, and k is at least 1.
    """

    name: ClassVar[str] = "gaussiank"
    rule: ClassVar[str] = "published"
    is_default: ClassVar[bool] = False

    def select(self, state: NoState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return this rank's indices beyond the threshold of the last scan."""
        yield from ()
        k = min(step.target_count, acc.numel())
        mean, deviation = mean_and_deviation(acc)
        threshold = mean + deviation * normal_quantile(k / acc.numel())
        for _ in range(MAX_SCANS):
            used, (indices, _magnitudes) = threshold, strictly_above(acc, threshold)
            count = indices.numel()
            if FEWEST * k <= count <= MOST * k:
                break
            threshold *= WIDER if count < FEWEST * k else NARROWER
        return Selection(indices, threshold=used)
