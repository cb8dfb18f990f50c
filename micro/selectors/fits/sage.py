"""SAGE: the threshold follows the mean magnitude of a sample."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.parts import Rule
from micro.randomness import generator
from micro.selectors.estimated import CorrectedFit, Fit
from micro.selectors.fits.sampling import odd_stride, strided_sample
from micro.selectors.threshold import hard_threshold
from micro.sparse import Selection, Step

SAMPLE_SIZE = 1 << 14  # gives a mean good to a percent, so that the threshold does not jitter with it
MARGIN = 0.05  # as published: of error in Slovin's formula for the sample's size
SMALLEST, LARGEST = 2.0**-126, 2.0**127  # normal float32: a threshold is kept between them


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
        sample = strided_sample(acc, odd_stride(acc.numel(), SAMPLE_SIZE), step, rank)
        return float(sample.mean(dtype=torch.float64))  # host sync: the threshold follows from it


@dataclass(slots=True)
class PublishedSageState:
    """The threshold of the last step, None before the first, and the mean of the last sample that was not all zero."""

    threshold: float | None = None
    mean: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSage(Fit[PublishedSageState]):
    """A threshold of the rank's own that three factors move: the public code step for step.

    Alpha is the ratio of the sampled means. One more scan examines the density at alpha times the threshold; then
    beta = 2 / (1 + exp(density - examined)), and gamma = 0.95 below a tenth of the density, 1.05 above ten times it.
    The thresholds of ranks drift apart.

    Source: as `Sage`. Differences: one gather of the sample (the code: a loop over 400 single elements); nothing
    selected on any rank is no error; a sample of zeros leaves alpha at 1, where the code divides by zero.
    """

    name: ClassVar[str] = "sage_published"
    state: ClassVar[type[PublishedSageState]] = PublishedSageState
    rule: ClassVar[Rule] = "published"

    def select(self, state: PublishedSageState, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return what passes this rank's threshold."""
        numel = acc.numel()
        size = max(1, math.floor(numel / (1 + numel * MARGIN**2)))  # at most 400
        places = torch.randint(numel, (size,), generator=generator(step.seed, step.index, rank)).to(acc.device)
        mean = float(acc.index_select(0, places).abs().mean(dtype=torch.float64))  # host sync: the scan's threshold
        if state.threshold is None:
            state.threshold = hard_threshold(k)
        else:
            alpha = mean / state.mean if mean and state.mean else 1.0
            density = k / numel
            examined = kernels.above(acc, state.threshold * alpha)[0].numel() / numel
            beta = 2.0 / (1.0 + math.exp(density - examined))
            gamma = 0.95 if examined / density < 0.1 else 1.05 if examined / density > 10.0 else 1.0
            state.threshold = min(max(state.threshold * alpha * beta * gamma, SMALLEST), LARGEST)
        state.mean = mean or state.mean
        return Selection(kernels.above(acc, state.threshold)[0], threshold=state.threshold)
