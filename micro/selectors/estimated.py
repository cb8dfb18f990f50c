"""Estimated: every rank's own k largest magnitudes, or about so many, by a threshold that a fit estimates."""

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
    """A way to estimate the k-th magnitude of a vector, and to select by the estimate. It sends nothing.

    A fit is a frozen dataclass in `micro.selectors.fits`, known by its ``name``. ``rule`` is 'published' where it
    follows the public code of its paper step for step, defects included; ``traits`` may ask for sums of the vector.
    """

    kind: ClassVar[str] = "fit"
    home: ClassVar[str] = "micro.selectors.fits"
    group: ClassVar[str] = "micro.fits"
    rule: ClassVar[Rule] = "repaired"
    traits: ClassVar[Traits] = Traits.NONE

    @abstractmethod
    def select(self, state: S, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return about the k largest magnitudes of ``acc`` (numel,), 1 <= k <= numel, on this rank alone."""


class CorrectedFit(Fit[Track]):
    """A fit whose estimate is multiplied by a factor learned from earlier steps: see `select_near`."""

    state: ClassVar[type[Track]] = Track

    @abstractmethod
    def estimate(self, acc: Tensor, k: int, step: Step, rank: int) -> float:
        """Return the estimated k-th magnitude of ``acc`` (numel,), without correction; any number, NaN included."""

    def select(self, state: Track, acc: Tensor, k: int, step: Step, rank: int) -> Selection:
        """Return what is at or above the corrected estimate: between k / 2 and 4 k / 3 indices."""
        return select_near(state, acc, self.estimate(acc, k, step, rank), k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimated(Selector[Any]):
    """Select about the k largest magnitudes of this rank by a threshold that a fit estimates, in place of a sort.

    Each rank selects on its own, with a threshold of its own, so the union grows with the number of ranks (build-up).

    Args:
        fit: how the k-th magnitude is estimated: a `Fit`, its name, or a mapping. 'gaussiank', 'sidco', 'dgc' and
            'reused' (Ok-Topk's); but for 'sidco', each followed by '_published' is the public code of its paper.

    Source: that of the fit.
    """

    fit: Fit[Any]
    name: ClassVar[str] = "estimated"
    sends: ClassVar[Choosing] = Choosing()

    def __post_init__(self) -> None:
        object.__setattr__(self, "fit", as_part(Fit, self.fit))

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # depends on the fit
        """What the fit wants."""
        return self.fit.traits

    @property
    def rule_name(self) -> str | None:
        """Whether the fit is repaired or as published."""
        return self.fit.rule

    @property
    def full_name(self) -> str:
        """The name of the fit, by which the method is known."""
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
