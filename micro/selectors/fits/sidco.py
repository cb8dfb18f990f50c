"""SIDCo: the threshold of a sparsity-inducing law, fitted again and again to what exceeds the last threshold."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from micro.selectors.base import Traits
from micro.selectors.fits.correction import Correction, select_near
from micro.selectors.fits.stages import StagedFit, StagesState, Survivors, fit_by_sums
from micro.sparse import Selection, Step


@dataclass(slots=True)
class SidcoState(StagesState):
    """How many stages there are, and what was learned about the fitted thresholds of each number of stages."""

    corrections: dict[int, Correction] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidco(StagedFit[SidcoState]):
    """The quantile of a law with a peak at zero, fitted in stages to ever fewer entries, corrected.

    A factor learned from earlier steps corrects the fitted threshold, one for each number of stages, and at most
    4 k / 3 are selected (`select_near`). The statistics come with the pass that adds the gradient; each further stage
    reads the vector once, or the survivors where they are few, and one scan selects.

    Args:
        law, stages: see `StagedFit`. The number of stages follows the count that the law would have given without the
            factor.

    Source: Abdelmoniem, Elzanaty, Alouini and Canini, An efficient statistical-based gradient compression technique for
    distributed training systems, MLSys 2021, arXiv 2101.10761, and its public code. Differences: the factor and the
    bound on the count; the number of stages is each bucket's own (the code shares it between all tensors) and starts at
    1; the vector is not divided by its norm, which changes nothing; the gamma law is fitted to what is not zero; where
    a fit has no answer the threshold is the limit it tends to (shape 0, no variance), and a stage with fewer than two
    survivors, or equal ones, ends the refinement (the code fails or divides by zero); a density of a quarter or more
    takes one stage.

    Raises:
        ValueError: no such law, or stages less than 1.
    """

    name: ClassVar[str] = "sidco"

    def start(self) -> SidcoState:
        """Return one stage, and nothing learned."""
        return SidcoState()

    def load(self, saved: dict[str, Any]) -> SidcoState:
        """Return the state that ``save`` described."""
        corrections = {stages: Correction(**track) for stages, track in saved["corrections"].items()}
        return SidcoState(**(saved | {"corrections": corrections}))

    @property
    def traits(self) -> Traits:
        """It wants the sums of the accumulator, unless its law is gamma, which also needs logarithms."""
        return Traits.NONE if self.law == "gamma" else Traits.WANTS_SUMS

    def fitted(
        self, state: SidcoState, acc: Tensor, shares: list[float], k: int, step: Step
    ) -> tuple[Selection, float]:
        """Fit to sums, and return near k beyond the corrected threshold, and about how many the law's would select."""
        correction = state.corrections.setdefault(len(shares), Correction())
        survivors = fit_by_sums(acc, self.law, shares, step.sums)
        selection = _near(correction, acc, survivors, k)
        return selection, _count_at(survivors.threshold, selection, correction)


def _near(correction: Correction, acc: Tensor, survivors: Survivors, k: int) -> Selection:
    """Select near k, among the survivors where there are enough of them: they are the largest magnitudes."""
    indices, magnitudes = survivors.indices, survivors.magnitudes
    if indices is None or magnitudes is None or indices.numel() < 2 * k:
        return select_near(correction, acc, survivors.threshold, k)
    among = select_near(correction, magnitudes, survivors.threshold, k)
    return Selection(indices.index_select(0, among.indices), threshold=among.threshold)


def _count_at(guess: float, selection: Selection, correction: Correction) -> float:
    """Return about how many the law's own threshold would have selected, along the tail of what was selected."""
    count, tail = float(selection.indices.numel()), correction.track.tail
    if not selection.threshold or not 0 < guess < math.inf or not tail > 0:
        return count
    return count * math.exp(max(-50.0, min(50.0, math.log(selection.threshold / guess) / tail)))
