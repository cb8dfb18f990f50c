"""ScaledElements: any selector by magnitude, given magnitudes in units of each element's own updates, as in Adam."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.requests import Reduction
from micro.scales import ElementScales
from micro.selectors.scaling import ScalingSelector, ScalingState
from micro.sparse import SparseValues, Step

SMALLEST_FACTOR = 2.0**-10  # of roots: below it they take it in, long before what is added to them would overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledElements(ScalingSelector):
    """Select by the magnitude divided by ``sqrt(v) + eps``, with v the running mean square of the element's updates.

    Adam moves an element by about ``lr * update / (sqrt(v) + eps)``, whatever the size of its gradients. In these units
    elements compete by how far they would move. v is made as Adam makes it, from the mean update, which is sparse:
    ``v = memory * v + (1 - memory) * update ** 2`` in every step, zeros included, so that what is seldom updated is
    preferred. All ranks receive the same update, so no message is needed to keep v alike.

    Before its first update, an element's v is the mean square of its parameter's accumulator at the first selection,
    and fades as v does: the first step selects as `Scaled` does. Ranks that share a threshold average these over all
    ranks; where a rank selects by itself, or leads, they are its own. A step that does not count is an update of zeros.
    Where v is zero, as in a parameter without a gradient at first, eps is the scale. The root of v stays finite.

    Costs per step: a vector of memory, of the residual's precision or float32, for the roots of v. They fade by a
    number that all have in common, so that a step changes those alone that it updates. MiCRO's agreed rule reads them
    beside its slice, where that is compiled; its other rules copy the slice that they search, other selectors have the
    whole vector copied. Of messages one all-reduce of 8 L bytes for L parameters, in the first selection alone.

    Args:
        selector: which indices of the scaled vector: a part, its name, or a mapping.
        memory: share of v that a step keeps, in [0, 1): the optimizer's second beta.
        eps: of the optimizer, positive.

    Statistics: there is no threshold, for it is none on magnitudes.

    Source: this project's; the scale is that of Kingma and Ba, Adam, ICLR 2015, arXiv 1412.6980, without the correction
    of its bias, which is the same for all elements.

    Raises:
        ValueError: a memory outside [0, 1), an eps that is not positive, or a selector that does not compare magnitudes
            of different parameters.
    """

    memory: float = 0.999
    eps: float = 1e-8
    name: ClassVar[str] = "scaled_elements"
    power: ClassVar[int] = 1  # square roots of v are kept, of all elements, all fading by one factor

    def __post_init__(self) -> None:
        if not 0 < self.eps < math.inf:
            raise ValueError(f"eps of {self.name} must be positive, got {self.eps}")
        ScalingSelector.__post_init__(self)

    def scales(self, state: ScalingState, acc: Tensor, step: Step, comm: Comm) -> Reduction[ElementScales]:
        """Return the roots of v, where all elements have one; else give the others that of their parameter first."""
        roots = state.of(step.layout, acc.device)
        if roots is None:
            layout, dtype = step.layout, torch.promote_types(acc.dtype, torch.float32)
            squares = yield from self.mean_squares(acc, step, comm)
            means = squares.sqrt().div_(state.factor).clamp_(max=torch.finfo(dtype).max).to(dtype)
            first = [mean.expand(numel) for mean, numel in zip(means, layout.numels, strict=True)]
            pieces = [state.by_name.get(name, own).to(means) for name, own in zip(layout.names, first, strict=True)]
            roots = state.join(layout, pieces)
        return ElementScales(roots, state.factor, self.eps)

    def observe(self, state: ScalingState, update: Tensor, step: Step, parts: Sequence[SparseValues] | None) -> None:
        """Take the update into the running means of squares, once there are any."""
        ScalingSelector.observe(self, state, update, step, parts)
        roots = state.of(step.layout, update.device)
        if roots is None:
            return
        state.factor *= math.sqrt(self.memory)
        if state.factor < SMALLEST_FACTOR:
            roots.mul_(state.factor)
            state.factor = 1.0
        weight = math.sqrt(1 - self.memory) / state.factor
        if parts is None:
            roots.copy_(_grown(roots, update, weight))
        elif parts:
            places = torch.cat([part.indices for part in parts]).long()
            grown = _grown(roots.index_select(0, places), update.index_select(0, places), weight)
            roots.index_copy_(0, places, grown)  # alike where twice


def _grown(roots: Tensor, update: Tensor, weight: float) -> Tensor:
    """Return roots (m,) to whose squares those of an update (m,), times the square of ``weight``, were added."""
    added = update.to(roots.dtype) * weight
    return torch.hypot(roots, added).clamp_(max=torch.finfo(roots.dtype).max)
