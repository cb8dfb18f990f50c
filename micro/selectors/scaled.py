"""Scaled: any selector by magnitude, given magnitudes in units of each parameter's own."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.flat import Layout
from micro.requests import Reduction
from micro.scales import Scales
from micro.selectors.base import Traits
from micro.selectors.scaling import ScalingSelector
from micro.sparse import Selection, Step
from micro.traffic import Calls, Choosing

LARGEST_FACTOR = 2.0**100


@dataclass(slots=True)
class ScaledState:
    """What `Scaled` keeps from step to step.

    Attributes:
        inner: the selector's state.
        names: of the parameters that have been measured.
        squares: (L,) float64, the running mean of squares of each one's accumulator; 0 where none is known.
    """

    inner: Any
    names: tuple[str, ...] = ()
    squares: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    @property
    def by_name(self) -> dict[str, float]:
        """The mean squares that are known, by parameter; an accelerator is read."""
        return {name: square for name, square in zip(self.names, self.squares.tolist(), strict=True) if square}

    def of(self, layout: Layout, device: torch.device) -> Tensor:
        """Return the mean squares (L,) of a layout's parameters on a device."""
        if self.names != layout.names:
            known = self.by_name
            self.names = layout.names
            self.squares = torch.tensor([known.get(name, 0.0) for name in self.names], dtype=torch.float64)
        return self.squares.to(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled(ScalingSelector[ScaledState]):
    """Select by the magnitude divided by the root mean square of the parameter's accumulator.

    With one threshold for a whole model, a parameter whose gradients are a thousandth of the others' waits until its
    residual has grown a thousandfold. Divided by their own scale, elements compete by how far they stand out in their
    parameter. What is sent are the values themselves: feedback, exchange and the control of the density are as without.
    The mean squares are running averages. Ranks that share a threshold, each in a slice of its own, average them over
    all ranks, so that all select by the same scale; where a rank selects by itself, or leads, they are its own.

    Costs per step: for L parameters an all-reduce of 8 L bytes where ranks share a threshold. The
    accumulator is read once more for the squares. MiCRO's agreed rule compares each parameter with a
    threshold of its own there; its other rules copy the slice that they search, other selectors have the whole vector
    copied (on an accelerator the factors too, one for each element).

    Args:
        selector: which indices of the scaled vector: a part, its name, or a mapping.
        memory: share of the running mean that a step keeps, in [0, 1); 0: each step's own.

    Statistics: there is no threshold, for it is none on magnitudes.

    Source: this project's.

    Raises:
        ValueError: a memory outside [0, 1), or a selector that does not compare magnitudes of different parameters.
    """

    memory: float = 0.9
    name: ClassVar[str] = "scaled"
    own_traits: ClassVar[Traits] = Traits.ALL_PARAMETERS

    def start(self) -> ScaledState:
        """Return a state that knows no scale yet."""
        return ScaledState(self.selector.start())

    def save(self, state: ScaledState) -> dict[str, Any]:
        """Return the selector's state, and the mean squares by name."""
        return {"inner": self.selector.save(state.inner), "squares": state.by_name}

    def load(self, saved: dict[str, Any]) -> ScaledState:
        """Return the state that ``save`` described."""
        return _state(self.selector.load(saved["inner"]), saved["squares"])

    def regroup(self, state: ScaledState, old: Sequence[tuple[Layout, ScaledState]], layout: Layout) -> ScaledState:
        """Return the state of the new bucket: its parameters' scales, wherever these were before."""
        known = {name: square for _, kept in old for name, square in kept.by_name.items()}
        inner = self.selector.regroup(state.inner, [(bucket, kept.inner) for bucket, kept in old], layout)
        return _state(inner, {name: known[name] for name in layout.names if name in known})

    def rescale_(self, state: ScaledState, factor: float) -> None:
        """Multiply the mean squares; see StatefulPart."""
        self.selector.rescale_(state.inner, factor)
        state.squares = state.squares * factor**2

    def choose(self, state: ScaledState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return what the selector chooses of the accumulator in units of each parameter's scale."""
        yield from self._measure(state, acc, step, comm)
        scales = Scales.of(step.layout.numels, _factors(state.squares))
        if Traits.TAKES_SCALES in self.selector.traits:
            return (yield from self.selector.select(state.inner, acc, replace(step, scales=scales), comm))
        return (yield from self.selector.select(state.inner, scales.scaled(acc), step, comm))

    def _measure(self, state: ScaledState, acc: Tensor, step: Step, comm: Comm) -> Reduction[None]:
        """Take this step's mean squares into the running ones; what is no number is left out."""
        squares = yield from self.mean_squares(acc, step, comm)
        known = state.of(step.layout, acc.device)
        before = torch.where(known > 0, known, squares)
        is_number = (squares > 0) & torch.isfinite(squares)
        state.squares = torch.where(is_number, self.memory * before + (1 - self.memory) * squares, known)

    def volume(self, layout: Layout, density: float, world_size: int) -> Choosing:
        """Return the mean squares, where ranks share a scale, and what the selector sends; see Selector."""
        said = self.selector.volume(layout, density, world_size)
        mean_squares: Calls = (("all_reduce", 8 * len(layout.names)),) if self.shares_scale else ()  # as float64
        return replace(said, calls=(*mean_squares, *said.calls))


def _state(inner: Any, squares: dict[str, float]) -> ScaledState:
    return ScaledState(inner, tuple(squares), torch.tensor([*squares.values()], dtype=torch.float64))


def _factors(squares: Tensor) -> Tensor:
    """Return the inverses of the scales (L,), which single precision holds; 1 where there is none yet."""
    return torch.where(squares > 0, squares.pow(-0.5).clamp_max(LARGEST_FACTOR), 1.0)
