"""The fit dgc: estimates the k-th magnitude from a sample; DGC combines it with the feedback `MomentumCorrection`."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro import kernels
from micro.parts import NoState, Rule
from micro.selectors.estimated import CorrectedFit, Fit
from micro.selectors.fits.sampling import odd_stride, smallest_of_largest, strided_sample
from micro.values.sparse import Selection, Step

SHARE = 0.01  # sampled part of the vector, as in the public code
HITS, FEWEST_HITS = 32, 2  # expected samples above the threshold: with 32, the count's relative error is 1 / sqrt(32)
UPPER, LOWER, MAX_ROUNDS = 1.3, 0.8, 10  # as published: the count's band in k, and the most rounds to reach it


@dataclass(frozen=True, slots=True, kw_only=True)
class DGC(CorrectedFit):
    """Estimates the k-th magnitude from a strided sample of the rank's accumulator, with a random start.

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887, section 3, and its public code.
    Differences: the bucket is one vector (theirs: tensor by tensor, one-dimensional ones dense); k is rounded down
    (code: up); the sample is large enough for 32 hits (code: 2); a count between k / 2 and 4/3 k is accepted (code: up
    to 10 more scans; from a count between k and 1.3 k, the k lowest indices); zeros are never sent.
    """

    name: ClassVar[str] = "dgc"

    def estimate(self, acc: Tensor, k: int, step: Step, rank: int) -> float:
        """Return the quantile of the sample at density k / numel."""
        numel = acc.numel()
        sample_size = max(math.ceil(SHARE * numel), math.ceil(HITS * numel / k))
        sample = strided_sample(acc, odd_stride(numel, sample_size), step, rank)
        return smallest_of_largest(sample, math.ceil(sample.numel() * k / numel))


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDGC(Fit[NoState]):
    """A sampled threshold, adapted in up to ten rounds: the public code step for step.

    A round with fewer than 0.8 k lowers the threshold by 0.8; one with more than 1.3 k is cut to the k largest; of a
    count in between, the k lowest indices are sent. Source: as `DGC`. Differences: the first two of `DGC`.
    """

    name: ClassVar[str] = "dgc_published"
    rule: ClassVar[Rule] = "published"

    def select(self, state: NoState, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return the k lowest indices that pass the adapted threshold."""
        numel = acc.numel()
        stride = _published_stride(numel, k)
        sample = strided_sample(acc, stride, step, rank)
        threshold = smallest_of_largest(sample, math.ceil(numel // stride * k / numel))
        indices, magnitudes = kernels.above(acc, threshold)
        for _ in range(MAX_ROUNDS if stride > 1 else 0):
            if indices.numel() > UPPER * k:
                indices = indices.index_select(0, kernels.largest(magnitudes, k))
                break
            if indices.numel() >= LOWER * k:
                break
            threshold *= LOWER
            indices, magnitudes = kernels.above(acc, threshold)
        return Selection(indices[:k], threshold=threshold)


def _published_stride(numel: int, k: int) -> int:
    """Return a multiple of 32, plus 1, lowered by 8 until the sample is large enough."""
    fewest = math.ceil(FEWEST_HITS * numel / k)
    if numel <= fewest:
        return 1
    fewest = max(math.ceil(SHARE * numel), fewest)
    stride = math.ceil(numel / fewest / 32) * 32 + 1
    while numel // stride < fewest:
        stride -= 8
    return stride
