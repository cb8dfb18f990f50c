"""Scaled: any selector by magnitude, given magnitudes in units of each parameter's own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.density.base import Target
from micro.flat import Layout
from micro.norms import norms_of
from micro.on_device import on_device
from micro.selectors.base import Selector
from micro.selectors.wrapping import WrappingSelector
from micro.sparse import Overlap, Selection, Step


@dataclass(slots=True)
class ScaledState:
    """The selector's state, and the running mean of squares of each parameter's accumulator, by name."""

    inner: Any
    squares: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled(WrappingSelector[ScaledState]):
    """Select by the magnitude divided by the root mean square of the parameter's accumulator.

    With one threshold for a whole model, a parameter whose gradients are a thousandth of the others' waits until its
    residual has grown a thousandfold. Divided by their own scale, elements compete by how far they stand out in their
    parameter. What is sent are the values themselves: feedback, exchange and the control of the density are as without.
    The mean squares are running averages. Ranks that share a threshold, each in a slice of its own, average them over
    all ranks, so that all select by the same scale; where a rank selects by itself, or leads, they are its own.

    Costs per step: two reads and one write of the vector more, a vector of memory, and for L parameters an all-reduce
    of 8 L bytes where ranks share a threshold.

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
    needs_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.memory < 1:
            raise ValueError(f"memory of {self.name} must be in [0, 1), got {self.memory}")
        WrappingSelector.__post_init__(self)

    @staticmethod
    def why_not(selector: Selector[Any]) -> str | None:
        """Return why a scale makes no difference to a selector, or no sense, or None where it does."""
        if selector.by_layer or selector.needs_all:
            return "weighs each parameter itself already"
        if selector.overlap is Overlap.SAME:
            return "does not look at magnitudes"
        if selector.wants_sums:
            return "fits a law to the accumulator as it is"
        return None

    @property
    def sends_indices(self) -> bool:  # type: ignore[override]  # depends on the selector
        """Whether the selector sends indices itself."""
        return self.selector.sends_indices

    @property
    def shares_scale(self) -> bool:
        """Whether ranks select by one scale: those that share a threshold."""
        return self.overlap is Overlap.DISJOINT

    def effective_target(self, target: Target, layout: Layout) -> Target:
        """Return what the selector aims at."""
        return self.selector.effective_target(target, layout)

    def start(self) -> ScaledState:
        """Return a state that knows no scale yet."""
        return ScaledState(self.selector.start())

    def save(self, state: ScaledState) -> dict[str, Any]:
        """Return the selector's state, and the mean squares by name."""
        return {"inner": self.selector.save(state.inner), "squares": dict(state.squares)}

    def load(self, saved: dict[str, Any]) -> ScaledState:
        """Return the state that ``save`` described."""
        return ScaledState(self.selector.load(saved["inner"]), dict(saved["squares"]))

    def regroup(self, state: ScaledState, old: Sequence[tuple[Layout, ScaledState]], layout: Layout) -> ScaledState:
        """Return the state of the new bucket: its parameters' scales, wherever these were before."""
        known = {name: square for _, kept in old for name, square in kept.squares.items()}
        inner = self.selector.regroup(state.inner, [(bucket, kept.inner) for bucket, kept in old], layout)
        return ScaledState(inner, {name: known[name] for name in layout.names if name in known})

    def select(self, state: ScaledState, acc: Tensor, step: Step, comm: Comm) -> Selection:
        """Return what the selector chooses of the accumulator in units of each parameter's scale."""
        self._measure(state, acc, step.layout, comm)
        scaled = acc.clone()
        factors = [_factor(state.squares[name]) for name in step.layout.names]
        torch._foreach_mul_(list(scaled.split(list(step.layout.numels))), factors)
        chosen = self.selector.select(state.inner, scaled, step, comm)
        return Selection(
            chosen.indices,
            counts=chosen.counts,
            spans=chosen.spans,
            scale=chosen.scale,
            everyone=chosen.everyone,
            overfull=chosen.overfull,
        )

    def _measure(self, state: ScaledState, acc: Tensor, layout: Layout, comm: Comm) -> None:
        """Take this step's mean squares into the running ones; what is no number is left out."""
        squares = norms_of(acc, list(layout.numels)).to(torch.float64).square_()
        squares /= on_device([max(numel, 1) for numel in layout.numels], torch.float64, acc.device)
        if self.shares_scale:
            squares = comm.all_reduce_(squares, "counts") / comm.world_size
        for name, square in zip(layout.names, squares.tolist(), strict=True):  # host sync: the scales
            if 0 < square < float("inf"):
                before = state.squares.get(name) or square
                state.squares[name] = self.memory * before + (1 - self.memory) * square
            else:
                state.squares.setdefault(name, 0.0)


def _factor(square: float) -> float:
    """Return the inverse of a scale; 1 where there is none yet."""
    return square**-0.5 if square else 1.0
