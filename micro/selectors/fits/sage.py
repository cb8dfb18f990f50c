"""SAGE: the threshold follows the mean magnitude of a sample."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.selectors.estimated import CorrectedFit
from micro.selectors.fits.sampling import odd_stride, own_randomness, strided_magnitudes
from micro.sparse import Step

SAMPLE_SIZE = 1 << 14  # gives a mean good to a percent, so that the threshold does not jitter with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Sage(CorrectedFit):
    """The mean magnitude of a sample, which the learned factor makes a threshold.

    The source multiplies the threshold from step to step by alpha, the ratio of the sampled means, and by corrections
    beta and gamma for the density found. Alpha is kept: the product of all alphas is the present mean over the first
    one, so the estimate is the mean itself. Beta and gamma are replaced: the factor on the mean follows the log of the
    count over k, up and down in the same way, at the slope that the tail itself shows (`select_near`). Beta lowers the
    threshold by a share of at most density / 2 per step: at a density of 0.001, a threshold that is a tenth too high
    takes 190 steps to come down.

    Source: Yoon and Oh, SAGE, The Journal of Supercomputing, 2023, and the public code of MiCRO, HiPC 2023, arXiv
    2310.00967, which holds it. Differences: see above; the sample is strided and larger, and read by one slice (the
    code: a loop over 400 single elements); the start is this step's own k-th magnitude (the code: 1 / (2 sqrt k)); one
    scan both examines and selects; nothing selected on any rank is no error.
    """

    name: ClassVar[str] = "sage"

    def estimate(self, acc: Tensor, k: int, step: Step, rank: int) -> float:
        """Return the sampled mean."""
        sample = strided_magnitudes(acc, odd_stride(acc.numel(), SAMPLE_SIZE), own_randomness(step, rank))
        return float(sample.mean(dtype=torch.float64))  # host sync: the threshold follows from it
