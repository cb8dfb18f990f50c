"""DGC as in its public code: a sampled threshold, adapted in up to ten rounds."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro import kernels
from micro.parts import NoState, Rule
from micro.selectors.estimated import Fit
from micro.selectors.fits.sampling import own_randomness, smallest_of_largest, strided_magnitudes
from micro.sparse import Selection, Step

SHARE = 0.01  # of the vector is sampled
FEWEST_HITS = 2  # samples expected above the threshold
UPPER, LOWER, MAX_ROUNDS = 1.3, 0.8, 10  # the count's band in k, and the rounds in which it is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDGC(Fit[NoState]):
    """A sampled threshold, adapted in up to ten rounds: the public code step for step.

    A round with fewer than 0.8 k lowers the threshold by 0.8; one with more than 1.3 k is cut to the k largest; of a
    count in between, the k lowest indices are sent. The method's other half is `MomentumCorrection`.

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887, section 3, and its public code.
    Differences: the bucket is searched as one vector (the code: tensor by tensor, those of one dimension sent dense); k
    is rounded down (the code: up).
    """

    name: ClassVar[str] = "dgc_published"
    rule: ClassVar[Rule] = "published"

    def select(self, state: NoState, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return the lowest k of what passes the adapted threshold."""
        numel = acc.numel()
        stride = sample_stride(numel, k)
        sample = strided_magnitudes(acc, stride, own_randomness(step, rank))
        threshold = smallest_of_largest(sample, math.ceil(numel // stride * k / numel))
        indices, magnitudes = kernels.above_with_magnitudes(acc, threshold)
        for _ in range(MAX_ROUNDS if stride > 1 else 0):
            if indices.numel() > UPPER * k:
                indices = indices.index_select(0, kernels.largest(magnitudes, k))
                break
            if indices.numel() >= LOWER * k:
                break
            threshold *= LOWER
            indices, magnitudes = kernels.above_with_magnitudes(acc, threshold)
        return Selection(indices[:k], threshold=threshold)


def sample_stride(numel: int, k: int) -> int:
    """Return a multiple of 32, plus 1, lowered by 8 until the sample is large enough."""
    fewest = math.ceil(FEWEST_HITS * numel / k)
    if numel <= fewest:
        return 1
    fewest = max(math.ceil(SHARE * numel), fewest)
    stride = math.ceil(numel / fewest / 32) * 32 + 1
    while numel // stride < fewest:
        stride -= 8
    return stride
