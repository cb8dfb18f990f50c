"""DGC: every rank estimates its k-th largest magnitude from a sample."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.requests import Reduction
from micro.selectors.base import Selector
from micro.selectors.fitting import Correction, select_near
from micro.selectors.sampling import odd_stride, own_randomness, smallest_of_largest, strided_magnitudes
from micro.sparse import Selection, Step

SHARE = 0.01  # of the vector is sampled, as in the public code
HITS = 32  # samples expected above the threshold: the estimate is good to 1 / sqrt(HITS) in the count


@dataclass(frozen=True, slots=True, kw_only=True)
class DGC(Selector[Correction]):
    """Select by a threshold that a sample of the rank's own accumulator gives.

    A strided sample with a random phase shows about where the k-th magnitude lies; one scan finds what is above. A
    factor learned from earlier steps corrects the estimate, and where more than 4/3 k pass, the k largest are kept
    (`select_near`). Each rank selects on its own, so the union grows with the number of ranks. The method's other half
    is `MomentumCorrection`.

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887, section 3, and its public code.
    Differences: the bucket is searched as one vector (theirs: tensor by tensor, those of one dimension sent dense); k
    is rounded down (the code: up); the sample is large enough for 32 hits where the code takes 2; between k / 2 and
    4/3 k are sent as they are (the code scans up to 10 times more, and of those between k and 1.3 k sends the k lowest
    indices); zeros are never sent. `PublishedDGC` follows the public code.
    """

    name: ClassVar[str] = "dgc"
    rule: ClassVar[str] = "repaired"

    def start(self) -> Correction:
        """Return a correction that has learned nothing yet."""
        return Correction()

    def select(self, state: Correction, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return what passes the sampled threshold."""
        yield from ()
        k = min(step.target_count, acc.numel())
        guess = _sampled_threshold(acc, k, own_randomness(step, comm))
        return select_near(state, acc, guess, k)


def _sampled_threshold(acc: Tensor, k: int, randomness: torch.Generator) -> float:
    numel = acc.numel()
    sample_size = max(math.ceil(SHARE * numel), math.ceil(HITS * numel / k))
    sample = strided_magnitudes(acc, odd_stride(numel, sample_size), randomness)
    return smallest_of_largest(sample, math.ceil(sample.numel() * k / numel))
