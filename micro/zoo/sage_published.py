"""SAGE as in its public code: a threshold that three factors move from step to step."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.parts import Rule
from micro.selectors.estimated import Fit
from micro.selectors.fits.sampling import own_randomness
from micro.selectors.threshold import hard_threshold
from micro.sparse import Selection, Step

MARGIN = 0.05  # of error in Slovin's formula for the sample's size
SMALLEST, LARGEST = 2.0**-126, 2.0**127  # normal float32: a threshold is kept between them


@dataclass(slots=True)
class PublishedSageState:
    """What a rank remembers.

    Attributes:
        threshold: of the last step; None before the first.
        mean: of the last sample that was not all zero; 0 before the first.
    """

    threshold: float | None = None
    mean: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSage(Fit[PublishedSageState]):
    """A threshold of the rank's own that three factors move: the public code step for step.

    Alpha is the ratio of the sampled means. One more scan examines the density at alpha times the threshold; then
    beta = 2 / (1 + exp(density - examined)), and gamma = 0.95 below a tenth of the density, 1.05 above ten times it.
    The thresholds of ranks drift apart.

    Source: Yoon and Oh, SAGE, The Journal of Supercomputing, 2023, and the public code of MiCRO, HiPC 2023, arXiv
    2310.00967, which holds it. Differences: one gather of the sample (the code: a loop over 400 single elements);
    nothing selected on any rank is no error; a sample of zeros leaves alpha at 1, where the code divides by zero.
    """

    name: ClassVar[str] = "sage_published"
    rule: ClassVar[Rule] = "published"

    def start(self) -> PublishedSageState:
        """Return the state before the first step."""
        return PublishedSageState()

    def select(self, state: PublishedSageState, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return what passes this rank's threshold."""
        mean = _sampled_mean(acc, own_randomness(step, rank))
        if state.threshold is None:
            state.threshold = hard_threshold(k)
        else:
            alpha = mean / state.mean if mean and state.mean else 1.0
            density = k / acc.numel()
            examined = kernels.above(acc, state.threshold * alpha).numel() / acc.numel()
            moved = state.threshold * alpha * _beta(density, examined) * _gamma(density, examined)
            state.threshold = min(max(moved, SMALLEST), LARGEST)
        state.mean = mean or state.mean
        return Selection(kernels.above(acc, state.threshold), threshold=state.threshold)


def _sampled_mean(acc: Tensor, randomness: torch.Generator) -> float:
    """Return the mean magnitude of at most 400 entries, drawn with replacement."""
    numel = acc.numel()
    size = max(1, math.floor(numel / (1 + numel * MARGIN**2)))
    places = torch.randint(numel, (size,), generator=randomness).to(acc.device)
    return float(acc.index_select(0, places).abs().mean(dtype=torch.float64))  # host sync: the scan's threshold


def _beta(density: float, examined: float) -> float:
    return 2.0 / (1.0 + math.exp(density - examined))


def _gamma(density: float, examined: float) -> float:
    if examined / density < 0.1:
        return 0.95
    return 1.05 if examined / density > 10.0 else 1.0
