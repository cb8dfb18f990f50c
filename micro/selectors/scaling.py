"""A selector that gives another one the accumulator in units of a scale: what is the same for every scale."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.density.base import Target
from micro.flat import Layout
from micro.norms import norms_of
from micro.on_device import on_device
from micro.requests import AllReduce, Reduction
from micro.selectors.base import Selector, Traits
from micro.selectors.wrapping import WrappingSelector
from micro.sparse import Overlap, Selection, SparseValues, Step
from micro.traffic import Choosing


class ScalingState(Protocol):
    """What every such selector keeps: the state of the selector inside."""

    inner: Any


S = TypeVar("S", bound=ScalingState)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSelector(WrappingSelector[S]):
    """Select by magnitudes in units of a scale, which subclasses define. What is sent are the values themselves.

    Args:
        selector: which indices of the scaled vector: a part, its name, or a mapping.
        memory: share of the running means of squares that a step keeps, in [0, 1).

    Statistics: there is no threshold, for it is none on magnitudes.

    Raises:
        ValueError: a memory outside [0, 1), or a selector that does not compare magnitudes of different parameters.
    """

    memory: float
    own_traits: ClassVar[Traits] = Traits.ALL_PARAMETERS
    kept_traits: ClassVar[Traits] = Traits.OWN_DENSITY | Traits.SENDS_INDICES

    def __post_init__(self) -> None:
        if not 0 <= self.memory < 1:
            raise ValueError(f"memory of {self.name} must be in [0, 1), got {self.memory}")
        WrappingSelector.__post_init__(self)

    @staticmethod
    def why_not(selector: Selector[Any]) -> str | None:
        """Return why a scale makes no difference to a selector, or no sense, or None where it does."""
        if selector.traits & (Traits.BY_PARAMETER | Traits.ALL_PARAMETERS):
            return "weighs each parameter itself already"
        if selector.overlap is Overlap.SAME:
            return "does not look at magnitudes"
        if Traits.WANTS_SUMS in selector.traits:
            return "fits a law to the accumulator as it is"
        return None

    @property
    def shares_scale(self) -> bool:
        """Whether ranks select by one scale: those that share a threshold."""
        return self.overlap is Overlap.DISJOINT

    def effective_target(self, target: Target, layout: Layout) -> Target:
        """Return what the selector aims at."""
        return self.selector.effective_target(target, layout)

    @abstractmethod
    def choose(self, state: S, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return what the selector inside chooses of the accumulator in units of its scale, which are finite."""

    def select(self, state: S, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return what the selector chooses of the accumulator in units of its scale."""
        chosen = yield from self.choose(state, acc, step, comm)
        return Selection(
            chosen.indices,
            counts=chosen.counts,
            spans=chosen.spans,
            scale=chosen.scale,
            all_indices=chosen.all_indices,
            overfull=chosen.overfull,
        )

    def observe(self, state: S, update: Tensor, step: Step, parts: Sequence[SparseValues] | None) -> None:
        """Let the selector inside learn of the update, too."""
        self.selector.observe(state.inner, update, step, parts)

    def mean_squares(self, acc: Tensor, step: Step, comm: Comm) -> Reduction[Tensor]:
        """Return the mean squares (L,) float64 of each parameter's accumulator, over all ranks where they share."""
        layout = step.layout
        numels = on_device([max(numel, 1) for numel in layout.numels], torch.float64, acc.device)
        squares = norms_of(acc, layout.numels).to(torch.float64).square_() / numels
        if not self.shares_scale:
            return squares
        total: Tensor = yield AllReduce(mine=squares, kind="counts")
        return total / comm.world_size

    def volume(self, layout: Layout, density: float, world_size: int) -> Choosing:
        """Return what the selector sends; see Selector. What else a scale needs is not sent in every step."""
        return self.selector.volume(layout, density, world_size)
