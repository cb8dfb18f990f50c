"""Scaled: any selector by magnitude, given magnitudes in units of each parameter's own."""

from dataclasses import dataclass, replace
from typing import ClassVar

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled(ScalingSelector):
    """Select by the magnitude divided by the root mean square of the parameter's accumulator.

    With one threshold for a whole model, a parameter whose gradients are a thousandth of the others' waits until its
    residual has grown a thousandfold. Divided by their own scale, elements compete by how far they stand out in their
    parameter. What is sent are the values themselves: feedback, exchange and the control of the density are as without.
    The mean squares are running averages. Ranks that share a threshold, each in a slice of its own, average them over
    all ranks, so that all select by the same scale; where a rank selects by itself, or leads, they are its own.

    Costs per step: for L parameters an all-reduce of 8 L bytes where ranks share a threshold. The
    accumulator is read once more for the squares. MiCRO copies the slice that it searches, other selectors have the
    whole vector copied (on an accelerator the factors too, one for each element).

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
    power: ClassVar[int] = 2  # mean squares are kept, one of each parameter; 0 where none is known

    def scales(self, state: ScalingState, acc: Tensor, step: Step, comm: Comm) -> Reduction[Scales]:
        """Take this step's mean squares into the running ones, which scale; what is no number is left out."""
        squares = yield from self.mean_squares(acc, step, comm)
        kept = state.of(step.layout, acc.device)
        if kept is None:
            none = torch.zeros_like(squares[:1])
            kept = state.join(step.layout, [state.by_name.get(name, none).to(none) for name in step.layout.names])
        before = torch.where(kept > 0, kept, squares)
        is_number = (squares > 0) & torch.isfinite(squares)
        kept.copy_(torch.where(is_number, self.memory * before + (1 - self.memory) * squares, kept))
        # what single precision holds; 1 where there is none yet
        factors = torch.where(kept > 0, kept.pow(-0.5).clamp_max(LARGEST_FACTOR), 1.0)
        return Scales.of(step.layout.numels, factors)

    def volume(self, layout: Layout, density: float, world_size: int) -> Choosing:
        """Return the mean squares, where ranks share a scale, and what the selector sends; see Selector."""
        inner = self.selector.volume(layout, density, world_size)
        if self.overlap is not Overlap.DISJOINT:
            return inner
        return replace(inner, calls=(("all_reduce", 8 * len(layout.names)), *inner.calls))  # as float64
