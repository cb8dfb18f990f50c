"""SIDCo as published: the fitted threshold as it is."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from micro.parts import Rule
from micro.selectors.fits.stages import StagedFit, StagesState, fit
from micro.sparse import Selection, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSidco(StagedFit[StagesState]):
    """What exceeds the quantile of a law with a peak at zero, fitted in stages to ever fewer entries.

    Args:
        law, stages: see `StagedFit`.

    Source: Abdelmoniem, Elzanaty, Alouini and Canini, An efficient statistical-based gradient compression technique for
    distributed training systems, MLSys 2021, arXiv 2101.10761, and its public code. Differences: those of `Sidco`, but
    for the factor and the bound on the count, which are not taken here.

    Raises:
        ValueError: no such law, or stages less than 1.
    """

    name: ClassVar[str] = "sidco_published"
    rule: ClassVar[Rule] = "published"

    def start(self) -> StagesState:
        """Return one stage."""
        return StagesState()

    def fitted(
        self, state: StagesState, acc: Tensor, shares: list[float], k: int, step: Step
    ) -> tuple[Selection, float]:
        """Fit the law in double precision, and return what exceeds its threshold, and how many those are."""
        survivors = fit(acc, self.law, shares)
        indices, _magnitudes = survivors.passed(acc)
        return Selection(indices, threshold=survivors.threshold), float(indices.numel())
