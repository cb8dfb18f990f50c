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
from micro.selectors.scaling import ScalingSelector, ScalingState
from micro.sparse import Overlap, Step
from micro.traffic import Choosing

LARGEST_FACTOR = 2.0**100


@dataclass(slots=True)
class ScaledState(ScalingState):
    """What `Scaled` keeps from step to step.

    Attributes:
        names: of the parameters that have been measured.
        squares: (L,) float64, the running mean of squares of each one's accumulator; 0 where none is known.
    """

    names: tuple[str, ...] = ()
    squares: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    @classmethod
    def of(cls, inner: Any, by_name: dict[str, float], names: Sequence[str]) -> "ScaledState":
        """Return the state with the mean squares of these parameters, as far as they are known."""
        squares = [by_name.get(name, 0.0) for name in names]
        return cls(inner, tuple(names), torch.tensor(squares, dtype=torch.float64))

    @property
    def by_name(self) -> dict[str, float]:
        """The mean squares that are known, by parameter; an accelerator is read."""
        return {name: square for name, square in zip(self.names, self.squares.tolist(), strict=True) if square}


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
    state: ClassVar[type[ScaledState]] = ScaledState

    def save(self, state: ScaledState) -> dict[str, Any]:
        """Return the selector's state, and the mean squares by name."""
        return {"inner": self.selector.save(state.inner), "squares": state.by_name}

    def load(self, saved: dict[str, Any]) -> ScaledState:
        """Return the state that ``save`` described."""
        return ScaledState.of(self.selector.load(saved["inner"]), saved["squares"], list(saved["squares"]))

    def regroup(self, state: ScaledState, old: Sequence[tuple[Layout, ScaledState]], layout: Layout) -> ScaledState:
        """Return the state of the new bucket: its parameters' scales, wherever these were before."""
        known = {name: square for _, kept in old for name, square in kept.by_name.items()}
        return ScaledState.of(self._regrouped(state, old, layout), known, [n for n in layout.names if n in known])

    def rescale_(self, state: ScaledState, factor: float) -> None:
        """Multiply the mean squares; see StatefulPart."""
        self.selector.rescale_(state.inner, factor)
        state.squares = state.squares * factor**2

    def scales(self, state: ScaledState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Scales]:
        """Take this step's mean squares into the running ones, which scale; what is no number is left out."""
        squares = yield from self.mean_squares(acc, step, comm)
        names = step.layout.names
        if state.names != names:
            now = ScaledState.of(state.inner, state.by_name, names)
            state.names, state.squares = now.names, now.squares
        known = state.squares.to(acc.device)
        before = torch.where(known > 0, known, squares)
        is_number = (squares > 0) & torch.isfinite(squares)
        state.squares = torch.where(is_number, self.memory * before + (1 - self.memory) * squares, known)
        # what single precision holds; 1 where there is none yet
        factors = torch.where(state.squares > 0, state.squares.pow(-0.5).clamp_max(LARGEST_FACTOR), 1.0)
        return Scales.of(step.layout.numels, factors)

    def volume(self, layout: Layout, density: float, world_size: int) -> Choosing:
        """Return the mean squares, where ranks share a scale, and what the selector sends; see Selector."""
        inner = self.selector.volume(layout, density, world_size)
        if self.overlap is not Overlap.DISJOINT:
            return inner
        return replace(inner, calls=(("all_reduce", 8 * len(layout.names)), *inner.calls))  # as float64
