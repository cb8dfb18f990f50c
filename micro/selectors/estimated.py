"""The selector estimated: each rank's about k largest magnitudes, above a threshold estimated by a fit."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.parts import Rule, StatefulPart, as_part
from micro.predicted_traffic import Choosing
from micro.selectors.base import Selector, Traits
from micro.selectors.fits.correction import select_near
from micro.selectors.steering import Track
from micro.values.sparse import Selection, Step

S = TypeVar("S")


class Fit(StatefulPart[S], ABC):
    """Estimates the k-th magnitude of a vector and selects by the estimate. It sends nothing.

    A fit is a frozen dataclass in `micro.selectors.fits`, found by its ``name``. ``rule`` is 'published' if it follows
    the public code of its paper step for step, including defects; ``traits`` may request sums of the vector.
    """

    kind: ClassVar[str] = "fit"
    home: ClassVar[str] = "micro.selectors.fits"
    group: ClassVar[str] = "micro.fits"
    rule: ClassVar[Rule] = "repaired"
    traits: ClassVar[Traits] = Traits.NONE

    @abstractmethod
    def select(self, state: S, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return about the k largest magnitudes of this rank's ``acc`` (numel,), 1 <= k <= numel."""


class CorrectedFit(Fit[Track]):
    """A fit whose estimate is multiplied by a factor learned from earlier steps: see `select_near`."""

    state: ClassVar[type[Track]] = Track

    @abstractmethod
    def estimate(self, acc: Tensor, k: int, step: Step, rank: int) -> float:
        """Return the estimated k-th magnitude of ``acc`` (numel,), without correction; any number, NaN included."""

    def select(self, state: Track, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return all indices at or above the corrected estimate: between k / 2 and 4 k / 3."""
        return select_near(state, acc, self.estimate(acc, k, step, rank), k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated(Selector[Any]):
    """Select about the k largest magnitudes of this rank by an estimated threshold, without sorting.

    Each rank selects with its own threshold, so the union grows with the number of ranks (build-up).

    Args:
        fit: estimates the k-th magnitude: a `Fit`, its name, or a mapping. 'gaussiank', 'sidco', 'dgc' or 'reused'
            (Ok-Topk's); except for 'sidco', the suffix '_published' selects the public code of the paper.

    Source: that of the fit.
    """

    fit: Fit[Any]
    name: ClassVar[str] = "estimated"
    sends: ClassVar[Choosing] = Choosing()

    def __post_init__(self) -> None:
        object.__setattr__(self, "fit", as_part(Fit, self.fit))

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # depends on the fit
        """The traits of the fit."""
        return self.fit.traits

    @property
    def rule_name(self) -> str | None:
        """The rule of the fit."""
        return self.fit.rule

    @property
    def full_name(self) -> str:
        """The name of the fit, which is also the method's."""
        return self.fit.name

    def start(self) -> Any:
        """Return the fit's state before the first step."""
        return self.fit.start()

    def load(self, saved: dict[str, Any]) -> Any:
        """Return the state that ``save`` described."""
        return self.fit.load(saved)

    def select(self, state: Any, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return what the fit selects."""
        yield from ()
        return self.fit.select(state, acc, min(step.target_count, acc.numel()), step, comm.rank)
