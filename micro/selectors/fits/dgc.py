"""DGC: every rank estimates its k-th largest magnitude from a sample."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro.selectors.estimated import CorrectedFit
from micro.selectors.fits.sampling import odd_stride, own_randomness, smallest_of_largest, strided_magnitudes
from micro.sparse import Step

SHARE = 0.01  # of the vector is sampled, as in the public code
HITS = 32  # samples expected above the threshold: the estimate is good to 1 / sqrt(HITS) in the count


@dataclass(frozen=True, slots=True, kw_only=True)
class DGC(CorrectedFit):
    """The k-th magnitude of a sample of the rank's own accumulator, strided, with a random phase.

    The method's other half is `MomentumCorrection`.

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
        sample = strided_magnitudes(acc, odd_stride(numel, sample_size), own_randomness(step, rank))
        return smallest_of_largest(sample, math.ceil(sample.numel() * k / numel))
