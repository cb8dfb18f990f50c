"""The fit sidco (SIDCo): a distribution with a peak at zero, refitted in stages to the largest entries."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from torch import Tensor

from micro.kernels import sums_above, sums_of
from micro.kernels.sums import Sums
from micro.selectors.base import Traits
from micro.selectors.estimated import Fit
from micro.selectors.fits.correction import Entries, select_near, strictly_above
from micro.selectors.fits.laws import Law, log_moments, quantile
from micro.selectors.steering import Track
from micro.values.sparse import Selection, Step

FIRST_SHARE = 0.25  # share that the first of several stages keeps
LISTED = 0.05  # if at most this share survives, survivors are listed; listing more costs more than a read
STEPS_PER_DECISION = 5  # steps between decisions about the number of stages
TOO_MANY, TOO_FEW = 1.2, 0.8  # mean count / k beyond which it changes


@dataclass(slots=True)
class SidcoState:
    """The number of stages, their recent counts, and the learned correction for each number of stages.

    Attributes:
        stages: fits per step.
        calls: steps since the last decision about their number.
        excess: sum of count / k over these steps.
        corrections: of the fitted threshold, by number of stages.
    """

    stages: int = 1
    calls: int = 0
    excess: float = 0.0
    corrections: dict[int, Track] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidco(Fit[SidcoState]):
    """Estimates the k-th magnitude by a distribution with a peak at zero, fitted in stages to fewer and fewer entries.

    The first stage fits the distribution to all magnitudes and keeps about a quarter; each further stage fits it to the
    survivors' excess over their smallest. A factor learned from earlier steps, one per number of stages, corrects the
    threshold, and at most 4 k / 3 are selected (`select_near`). The pass that adds the gradient computes the first
    stage's sums; each further stage reads the vector once, or a list of few survivors; one scan selects.

    Args:
        law: 'exponential' (double exponential gradients, the paper's SIDCo-E), 'gamma' (double gamma first, generalised
            Pareto after it, SIDCo-GP) or 'pareto' (double generalised Pareto, SIDCo-P).
        stages: fits per step, at most ceil(log2(numel / k)). None: start with 1 and follow the uncorrected counts: one
            fewer after 5 steps with more than 1.2 k on average, one more after 5 steps with less than 0.8 k.

    Source: Abdelmoniem, Elzanaty, Alouini and Canini, An efficient statistical-based gradient compression technique for
    distributed training systems, MLSys 2021, arXiv 2101.10761, and its public code. Differences: the factor and the
    bound on the count; each bucket has its number of stages (code: shared by all tensors), which starts at 1; the
    vector is not divided by its norm, which has no effect; the gamma law is fitted to nonzero entries; a fit without a
    solution uses its limit (shape 0, no variance), and a stage with fewer than two survivors, or equal ones, is the
    last (the code fails or divides by zero); a density of a quarter or more uses one stage.

    Raises:
        ValueError: no such law, or stages less than 1.
    """

    law: Law = "exponential"
    stages: int | None = None
    name: ClassVar[str] = "sidco"
    state: ClassVar[type[SidcoState]] = SidcoState

    def __post_init__(self) -> None:
        if self.law not in get_args(Law):
            raise ValueError(f"law of {self.name} must be one of {', '.join(get_args(Law))}, got '{self.law}'")
        if self.stages is not None and self.stages < 1:
            raise ValueError(f"stages of {self.name} must be at least 1, or None to adapt, got {self.stages}")

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # depends on the law
        """WANTS_SUMS, except for the law gamma, which also needs logarithms."""
        return Traits.NONE if self.law == "gamma" else Traits.WANTS_SUMS

    def load(self, saved: dict[str, Any]) -> SidcoState:
        """Return the state that ``save`` described."""
        corrections = {stages: Track(**track) for stages, track in saved["corrections"].items()}
        return SidcoState(**(saved | {"corrections": corrections}))

    def select(self, state: SidcoState, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Fit in stages, return the indices above the threshold, and adapt the number of stages."""
        density = k / acc.numel()
        most = most_stages(density)
        num_stages = min(self.stages or state.stages, most)
        threshold, survivors = fit(acc, self.law, stage_shares(density, num_stages), step.sums)
        selection, law_count = self._select_above(state, acc, threshold, survivors, k, num_stages)
        if self.stages is None:
            _adapt_stages(state, law_count / k, num_stages, most)
        return selection

    def _select_above(
        self, state: SidcoState, acc: Tensor, threshold: float, survivors: Entries | None, k: int, num_stages: int
    ) -> tuple[Selection, float]:
        """Return the selection above the corrected threshold, and the estimated count above the uncorrected one."""
        correction = state.corrections.setdefault(num_stages, Track())
        if survivors is None or survivors[0].numel() < 2 * k:
            selection = select_near(correction, acc, threshold, k)
        else:  # the survivors include the k largest
            among = select_near(correction, survivors[1], threshold, k)
            selection = Selection(survivors[0].index_select(0, among.indices), threshold=among.threshold)
        count, tail = float(selection.indices.numel()), correction.tail
        if selection.threshold and 0 < threshold < math.inf and tail > 0:  # extrapolate along the tail of the selection
            count *= math.exp(max(-50.0, min(50.0, math.log(selection.threshold / threshold) / tail)))
        return selection, count


def most_stages(density: float) -> int:
    """Return ceil(log2(1 / density)), at least 1; 1 also if the first of several stages would keep too few."""
    return max(1, math.ceil(-math.log2(density))) if density < FIRST_SHARE else 1


def stage_shares(density: float, num_stages: int) -> list[float]:
    """Return the share of survivors that each stage keeps; their product is ``density``."""
    if num_stages == 1:
        return [density]
    return [FIRST_SHARE, *[(density / FIRST_SHARE) ** (1 / (num_stages - 1))] * (num_stages - 1)]


def fit(acc: Tensor, law: Law, shares: list[float], sums: Sums | None) -> tuple[float, Entries | None]:
    """Fit a law to abs(acc) (numel,) in stages that keep these shares.

    Each stage reads acc once, or a list of the survivors if they are few.

    Args:
        sums: of acc, if known.
    Returns:
        the threshold of the last stage on abs(acc), and the list that it was fitted to, None for acc itself.
    """
    if law == "gamma":
        size, mean, mean_log = log_moments(acc)
        variance = 0.0
    else:
        size, (mean, variance), mean_log = acc.numel(), _moments(sums or sums_of(acc), 0.0), 0.0
    threshold = quantile(law, mean, variance, mean_log, min(1.0, shares[0] * acc.numel() / max(size, 1)))
    law, share_left, survivors = "pareto" if law == "gamma" else law, shares[0], None
    for share in shares[1:]:
        if survivors is None and share_left <= LISTED:
            survivors = passed(acc, threshold, None)
        above = sums_above(acc if survivors is None else survivors[1], threshold)
        mean, variance = _moments(above, above.smallest) if above.count > 1 else (0.0, 0.0)
        if not mean > 0:
            break
        threshold = above.smallest + quantile(law, mean, variance, 0.0, share)
        share_left *= share
    return threshold, survivors


def passed(acc: Tensor, threshold: float, survivors: Entries | None) -> Entries:
    """Return the entries of ``acc`` (numel,) that exceed the threshold; all of them are among the survivors."""
    if survivors is None:
        return strictly_above(acc, threshold)
    places, magnitudes = strictly_above(survivors[1], threshold)
    return survivors[0].index_select(0, places), magnitudes


def _moments(sums: Sums, floor: float) -> tuple[float, float]:
    """Return mean and unbiased variance of the magnitudes' excess over ``floor``."""
    if not sums.count:
        return 0.0, 0.0
    return sums.mean_magnitude - floor, sums.variance_of_magnitudes if sums.count > 1 else 0.0


def _adapt_stages(state: SidcoState, excess: float, num_stages: int, most: int) -> None:
    """Change the number of stages by one if the mean excess of the last steps requires it."""
    state.calls, state.excess = state.calls + 1, state.excess + excess
    if state.calls < STEPS_PER_DECISION:
        return
    mean = state.excess / state.calls
    change = (mean < TOO_FEW) - (mean > TOO_MANY)
    state.stages, state.calls, state.excess = max(1, min(most, num_stages + change)), 0, 0.0
