"""A selector that gives another one the accumulator in units of a scale: what is the same for every scale."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.density.base import Target
from micro.flat import Layout
from micro.norms import norms_of
from micro.on_device import on_device
from micro.requests import AllReduce, Reduction
from micro.scales import AnyScales
from micro.selectors.base import Selector, Traits
from micro.selectors.wrapping import WrappingSelector
from micro.sparse import Overlap, Selection, SparseValues, Step
from micro.traffic import Choosing


@dataclass(slots=True)
class ScalingState:
    """The state of the selector inside, and running means that scales follow from.

    Attributes:
        by_name: those of each parameter (m,): views of ``joined`` where there is that.
        factor: by which all of them are to be multiplied, in (0, 1].
        joined: all of them in the order of the bucket; None after a change of buckets or of the process.
    """

    inner: Any
    by_name: dict[str, Tensor] = field(default_factory=dict)
    factor: float = 1.0
    joined: Tensor | None = None

    def of(self, layout: Layout, device: torch.device) -> Tensor | None:
        """Return those of a layout's parameters on a device, or None where one has none yet."""
        if self.joined is None and all(name in self.by_name for name in layout.names):
            self.join(layout, [self.by_name[name].to(device) for name in layout.names])
        return self.joined

    def join(self, layout: Layout, pieces: Sequence[Tensor]) -> Tensor:
        """Keep a copy of ``pieces``, one for each parameter, and return all of them in one vector."""
        self.joined = torch.cat(list(pieces))
        parts = self.joined.split([piece.numel() for piece in pieces])
        self.by_name = dict(zip(layout.names, parts, strict=True))
        return self.joined


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSelector(WrappingSelector[ScalingState]):
    """Select by magnitudes in units of a scale, which subclasses define. What is sent are the values themselves.

    Subclasses set ``power``: of the unit of gradients, in what they keep.

    Args:
        selector: which indices of the scaled vector: a part, its name, or a mapping.
        memory: share of the running means of squares that a step keeps, in [0, 1).

    Statistics: there is no threshold, for it is none on magnitudes.

    Raises:
        ValueError: a memory outside [0, 1), or a selector that does not compare magnitudes of different parameters.
    """

    memory: float
    power: ClassVar[int]
    state: ClassVar[type[ScalingState]] = ScalingState
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
        return "fits a law to the accumulator as it is" if Traits.WANTS_SUMS in selector.traits else None

    def start(self) -> ScalingState:
        """Return a state that knows no scale yet."""
        return ScalingState(self.selector.start())

    def save(self, state: ScalingState) -> dict[str, Any]:
        """Return the selector's state, and what is known by parameter."""
        by_name = {name: piece.clone() for name, piece in state.by_name.items()}
        return {"inner": self.selector.save(state.inner), "by_name": by_name, "factor": state.factor}

    def load(self, saved: dict[str, Any]) -> ScalingState:
        """Return the state that ``save`` described."""
        by_name = {name: piece.clone() for name, piece in saved["by_name"].items()}  # rescale_ changes them in place
        return ScalingState(self.selector.load(saved["inner"]), by_name, saved["factor"])

    def regroup(self, state: ScalingState, old: Sequence[tuple[Layout, ScalingState]], layout: Layout) -> ScalingState:
        """Return the state of the new bucket: what its parameters have, wherever these were before."""
        inner = self.selector.regroup(state.inner, [(bucket, kept.inner) for bucket, kept in old], layout)
        known = [kept for _, kept in old if any(name in layout.names for name in kept.by_name)]
        factor = max((kept.factor for kept in known), default=1.0)
        by_name = {name: piece * (kept.factor / factor) for kept in known for name, piece in kept.by_name.items()}
        return ScalingState(inner, {name: by_name[name] for name in layout.names if name in by_name}, factor)

    def rescale_(self, state: ScalingState, factor: float) -> None:
        """Multiply what is known; see StatefulPart."""
        self.selector.rescale_(state.inner, factor)
        for piece in state.by_name.values():
            piece.mul_(factor**self.power)

    def effective_target(self, target: Target, layout: Layout) -> Target:
        """Return what the selector aims at."""
        return self.selector.effective_target(target, layout)

    @abstractmethod
    def scales(self, state: ScalingState, acc: Tensor, step: Step, comm: Comm) -> Reduction[AnyScales]:
        """Return the scales of the accumulator, which are finite; what they follow is in the state."""

    def select(self, state: ScalingState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return what the selector chooses of the accumulator in units of its scale."""
        scales = yield from self.scales(state, acc, step, comm)
        if Traits.TAKES_SCALES in self.selector.traits:
            step = replace(step, scales=scales)
        else:
            acc = scales.scaled(acc)
        chosen = yield from self.selector.select(state.inner, acc, step, comm)
        return replace(chosen, threshold=None)

    def observe(self, state: ScalingState, update: Tensor, step: Step, parts: Sequence[SparseValues] | None) -> None:
        """Let the selector inside learn of the update, too."""
        self.selector.observe(state.inner, update, step, parts)

    def mean_squares(self, acc: Tensor, step: Step, comm: Comm) -> Reduction[Tensor]:
        """Return the mean squares (L,) float64 of each parameter, over all ranks where these share a threshold."""
        numels = on_device([max(numel, 1) for numel in step.layout.numels], torch.float64, acc.device)
        squares = norms_of(acc, step.layout.numels).square_() / numels
        if self.overlap is not Overlap.DISJOINT:
            return squares
        total: Tensor = yield AllReduce(mine=squares, kind="counts")
        return total / comm.world_size

    def volume(self, layout: Layout, density: float, world_size: int) -> Choosing:
        """Return what the selector sends; see Selector. What else a scale needs is not sent in every step."""
        return self.selector.volume(layout, density, world_size)
