"""DGC: every rank estimates its k-th largest magnitude from a sample. The method's other half: `MomentumCorrection`."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro import kernels
from micro.parts import NoState, Rule
from micro.selectors.estimated import CorrectedFit, Fit
from micro.selectors.fits.sampling import odd_stride, smallest_of_largest, strided_sample
from micro.values.sparse import Selection, Step

SHARE = 0.01  # of the vector is sampled, as in the public code
HITS, FEWEST_HITS = 32, 2  # samples expected above the threshold: 32 are good to 1 / sqrt(32) in the count
UPPER, LOWER, MAX_ROUNDS = 1.3, 0.8, 10  # as published: the count's band in k, and the rounds in which it is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class DGC(CorrectedFit):
    """The k-th magnitude of a sample of the rank's own accumulator, strided, with a random phase.

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887, section 3, and its public code.
    Differences: the bucket is searched as one vector (theirs: tensor by tensor, those of one dimension sent dense); k
    is rounded down (the code: up); the sample is large enough for 32 hits where the code takes 2; between k / 2 and
    4/3 k are sent as they are (the code scans up to 10 times more, and of those between k and 1.3 k sends the k lowest
    indices); zeros are never sent.
    """

    name: ClassVar[str] = "dgc"

    def estimate(self, acc: Tensor, k: int, step: Step, rank: int) -> float:
        """Return the magnitude that the sample's share of k reaches."""
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
        """Return the lowest k of what passes the adapted threshold."""
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
