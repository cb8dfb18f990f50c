"""A law fitted in stages, each to what exceeds the last threshold: what SIDCo and its public code share."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TypeVar, get_args

from torch import Tensor

from micro.kernels import sums_above, sums_of
from micro.kernels.sums import Sums
from micro.selectors.estimated import Fit
from micro.selectors.fits.correction import strictly_above
from micro.selectors.fits.laws import Law, moments, quantile
from micro.sparse import Selection, Step

FIRST_SHARE = 0.25  # what the first of several stages keeps
LISTED = 0.05  # where no more than this share survives, survivors are listed: to list many costs more than a read
STEPS_PER_DECISION = 5  # steps between two decisions about the number of stages
TOO_MANY, TOO_FEW = 1.2, 0.8  # mean count / k beyond which it changes


@dataclass(slots=True)
class StagesState:
    """How many stages there are now, and how well they did.

    Attributes:
        stages: fits per step.
        calls: steps since the last decision about them.
        excess: sum of count / k over these steps.
    """

    stages: int = 1
    calls: int = 0
    excess: float = 0.0


S = TypeVar("S", bound=StagesState)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFit(Fit[S]):
    """The quantile of a law with a peak at zero, fitted in stages to ever fewer entries.

    The first stage fits the law to all magnitudes and keeps about a quarter; each further one fits it to how far the
    survivors exceed their smallest.

    Args:
        law: 'exponential' (double exponential gradients, the paper's SIDCo-E), 'gamma' (double gamma first, generalised
            Pareto after it, SIDCo-GP) or 'pareto' (double generalised Pareto, SIDCo-P).
        stages: fits per step, at most ceil(log2(numel / k)); None follows the counts: from 1 on, one fewer after 5
            steps of more than 1.2 k on average, one more after 5 steps of less than 0.8 k.

    Raises:
        ValueError: no such law, or stages less than 1.
    """

    law: Law = "exponential"
    stages: int | None = None

    def __post_init__(self) -> None:
        if self.law not in get_args(Law):
            raise ValueError(f"law of {self.name} must be one of {', '.join(get_args(Law))}, got '{self.law}'")
        if self.stages is not None and self.stages < 1:
            raise ValueError(f"stages of {self.name} must be at least 1, or None to adapt, got {self.stages}")

    def select(self, state: S, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Fit, and return what lies beyond."""
        density = k / acc.numel()
        most = most_stages(density)
        num_stages = min(self.stages or state.stages, most)
        shares = stage_shares(density, num_stages)
        selection, law_count = self.fitted(state, acc, shares, k, step)
        if self.stages is None:
            _adapt_stages(state, law_count / k, num_stages, most)
        return selection

    @abstractmethod
    def fitted(self, state: S, acc: Tensor, shares: list[float], k: int, step: Step) -> tuple[Selection, float]:
        """Fit the law in stages, and return what is selected, and how many the fitted threshold itself selects.

        Args:
            shares: of its survivors that each stage keeps.
        """


@dataclass(frozen=True, slots=True)
class Survivors:
    """What a fit in stages leaves.

    Attributes:
        threshold: of the last stage, on abs(acc).
        indices: (m,) int32 of the entries that the last stage was fitted to, ascending; None for all.
        magnitudes: theirs (m,).
    """

    threshold: float
    indices: Tensor | None = None
    magnitudes: Tensor | None = None

    def passed(self, acc: Tensor) -> tuple[Tensor, Tensor]:
        """Return indices and magnitudes of the entries of ``acc`` (numel,) that exceed the threshold."""
        if self.indices is None or self.magnitudes is None:
            return strictly_above(acc, self.threshold)
        places, magnitudes = strictly_above(self.magnitudes, self.threshold)
        return self.indices.index_select(0, places), magnitudes


def most_stages(density: float) -> int:
    """Return ceil(log2(1 / density)), at least 1; 1 also where the first of several stages would keep too little."""
    return max(1, math.ceil(-math.log2(density))) if density < FIRST_SHARE else 1


def stage_shares(density: float, num_stages: int) -> list[float]:
    """Return the share that each stage keeps of the last one's survivors; their product is ``density``."""
    if num_stages == 1:
        return [density]
    return [FIRST_SHARE, *[(density / FIRST_SHARE) ** (1 / (num_stages - 1))] * (num_stages - 1)]


def fit(acc: Tensor, law: Law, shares: list[float]) -> Survivors:
    """Fit a law to abs(acc) (numel,) in stages that keep these shares, all in double precision."""
    size, mean, variance, mean_log = moments(acc, logs=law == "gamma")
    density = min(1.0, shares[0] * acc.numel() / max(size, 1))  # among those that the law is fitted to
    survivors = Survivors(quantile(law, mean, variance, mean_log, density))
    law = "pareto" if law == "gamma" else law
    for share in shares[1:]:
        indices, magnitudes = survivors.passed(acc)
        if indices.numel() < 2:
            return survivors
        floor = magnitudes.min()
        _, mean, variance, _ = moments(magnitudes - floor)
        if not mean > 0:
            return survivors
        threshold = float(floor) + quantile(law, mean, variance, 0.0, share)  # host sync: the next stage's scan
        survivors = Survivors(threshold, indices, magnitudes)
    return survivors


def fit_by_sums(acc: Tensor, law: Law, shares: list[float], sums: Sums | None) -> Survivors:
    """Do what `fit` does with sums that hold some rounding: a stage reads its vector once and copies nothing.

    That vector is acc until few survive, and then a list of them.
    """
    if law == "gamma":
        size, mean, variance, mean_log = moments(acc, logs=True)
    else:
        sums = sums or sums_of(acc)
        size, mean, variance, mean_log = acc.numel(), *_moments(sums, 0.0), 0.0
    survivors = Survivors(quantile(law, mean, variance, mean_log, min(1.0, shares[0] * acc.numel() / max(size, 1))))
    law, share_left = "pareto" if law == "gamma" else law, shares[0]
    for share in shares[1:]:
        if survivors.indices is None and share_left <= LISTED:
            survivors = Survivors(survivors.threshold, *survivors.passed(acc))
        above = sums_above(acc if survivors.magnitudes is None else survivors.magnitudes, survivors.threshold)
        mean, variance = _moments(above, above.smallest) if above.count > 1 else (0.0, 0.0)
        if not mean > 0:
            return survivors
        threshold = above.smallest + quantile(law, mean, variance, 0.0, share)
        survivors, share_left = replace(survivors, threshold=threshold), share_left * share
    return survivors


def _moments(sums: Sums, floor: float) -> tuple[float, float]:
    """Return mean and unbiased variance of how far magnitudes exceed ``floor``."""
    if not sums.count:
        return 0.0, 0.0
    return sums.mean_magnitude - floor, sums.variance_of_magnitudes if sums.count > 1 else 0.0


def _adapt_stages(state: StagesState, excess: float, num_stages: int, most: int) -> None:
    """Change the number of stages by one where the mean excess of the last steps calls for it."""
    state.calls, state.excess = state.calls + 1, state.excess + excess
    if state.calls < STEPS_PER_DECISION:
        return
    mean = state.excess / state.calls
    change = (mean < TOO_FEW) - (mean > TOO_MANY)
    state.stages, state.calls, state.excess = max(1, min(most, num_stages + change)), 0, 0.0
