"""SAGE: every rank's own threshold follows the mean magnitude of a sample."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.comm import Comm
from micro.parts import Rule, check_rule
from micro.selectors.base import Selector
from micro.selectors.fitting import Correction, select_near
from micro.selectors.sampling import odd_stride, own_randomness, strided_magnitudes
from micro.selectors.threshold import hard_threshold
from micro.sparse import Selection, Step

MARGIN = 0.05  # of error in Slovin's formula for the sample's size
SAMPLE = 1 << 14  # of the repaired rule: a mean good to a percent, so that the threshold does not jitter with it
SMALLEST, LARGEST = 2.0**-126, 2.0**127  # normal float32: what a threshold is kept in


@dataclass(slots=True)
class SageState:
    """What a rank remembers.

    Attributes:
        threshold: of the last step; None before the first.
        mean: of the last sample that was not all zero; 0 before the first.
        correction: of the repaired rule.
    """

    threshold: float | None = None
    mean: float = 0.0
    correction: Correction = field(default_factory=Correction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sage(Selector[SageState]):
    """Select by a threshold of the rank's own, moved by the mean magnitude of a sample and by the density it gives.

    From step to step the threshold is multiplied by alpha, the ratio of the sampled means, and by corrections for the
    density found. Ranks choose by themselves, so the union grows with their number, and their thresholds drift apart.

    Args:
        rule: 'repaired', see below; 'published', the authors' public code step for step: alpha, then
            beta = 2 / (1 + exp(density - examined)) from one more scan, then gamma = 0.95 below a tenth of the density,
            1.05 above ten times it.

    The repaired rule keeps alpha and replaces beta and gamma. All alphas together are the present mean over the first
    one, so the mean itself is the guess, and the factor on it follows the log of the count over k, up and down alike,
    at the slope that the tail itself shows (`select_near`). Beta lowers the threshold by a share of density / 2
    per step at most: at a density of 0.001, one that is a tenth too high takes 190 steps to come down.

    Source: Yoon and Oh, SAGE, The Journal of Supercomputing, 2023, and the public code of MiCRO, HiPC 2023, arXiv
    2310.00967, which holds it. Differences of both rules: one gather of the sample (the code: a loop over 400 single
    elements), and nothing selected on any rank is no error. 'published': a sample of zeros leaves alpha at 1, where the
    code divides by zero. 'repaired': the sample is strided and larger; the start is this step's own k-th magnitude
    (the code: 1 / (2 sqrt k)); the scan that selects is the one that examines.

    Raises:
        ValueError: no such rule.
    """

    rule: Rule = "repaired"
    name: ClassVar[str] = "sage"

    def __post_init__(self) -> None:
        check_rule(self)

    def start(self) -> SageState:
        """Return the state before the first step."""
        return SageState()

    def load(self, saved: dict[str, Any]) -> SageState:
        """Return the state that ``save`` described."""
        return SageState(**saved | {"correction": Correction(**saved["correction"])})

    def select(self, state: SageState, acc: Tensor, step: Step, comm: Comm) -> Selection:
        """Return what passes this rank's threshold."""
        randomness, k = own_randomness(step, comm), min(step.target_count, acc.numel())
        if self.rule == "published":
            return _published(state, acc, k, randomness)
        sample = strided_magnitudes(acc, odd_stride(acc.numel(), SAMPLE), randomness)
        mean = float(sample.mean(dtype=torch.float64))  # host sync: the scan's threshold
        return select_near(state.correction, acc, mean, k)


def _published(state: SageState, acc: Tensor, k: int, randomness: torch.Generator) -> Selection:
    mean = _mean_of_few(acc, randomness)
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


def _mean_of_few(acc: Tensor, randomness: torch.Generator) -> float:
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
