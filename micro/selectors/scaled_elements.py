"""ScaledElements: any selector by magnitude, given magnitudes in units of each element's own updates, as in Adam."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.flat import Layout
from micro.requests import Reduction
from micro.scales import ElementScales
from micro.selectors.scaling import ScalingSelector, ScalingState
from micro.sparse import SparseValues, Step

SMALLEST_FACTOR = 2.0**-10  # of roots: below it they take it in, long before what is added to them would overflow


@dataclass(slots=True)
class ScaledElementsState(ScalingState):
    """What `ScaledElements` keeps from step to step: square roots of v, all fading by one factor.

    Attributes:
        by_name: the roots (numel of the parameter,) of its elements, by parameter; views of ``roots`` where there are
            these.
        factor: by which all of them are to be multiplied, in (SMALLEST_FACTOR, 1].
        roots: (numel,) all of them in the order of the bucket; None after a change of buckets or of the process.
    """

    by_name: dict[str, Tensor] = field(default_factory=dict)
    factor: float = 1.0
    roots: Tensor | None = None

    def of(self, layout: Layout, device: torch.device) -> Tensor | None:
        """Return the roots (numel,) of a layout's elements on a device, or None where one has none yet."""
        if self.roots is None and all(name in self.by_name for name in layout.names):
            self.fill(layout, [self.by_name[name].to(device) for name in layout.names])
        return self.roots

    def fill(self, layout: Layout, pieces: Sequence[Tensor]) -> Tensor:
        """Keep the roots of each parameter (numel of it,), and return all of them (numel,)."""
        self.roots = torch.cat(list(pieces))
        self.by_name = layout.split(self.roots)
        return self.roots

    def fade(self, roots: Tensor, memory: float) -> None:
        """Multiply v by ``memory``."""
        self.factor *= math.sqrt(memory)
        if self.factor < SMALLEST_FACTOR:
            roots.mul_(self.factor)
            self.factor = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledElements(ScalingSelector[ScaledElementsState]):
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
    state: ClassVar[type[ScaledElementsState]] = ScaledElementsState

    def __post_init__(self) -> None:
        if not 0 < self.eps < math.inf:
            raise ValueError(f"eps of {self.name} must be positive, got {self.eps}")
        ScalingSelector.__post_init__(self)

    def save(self, state: ScaledElementsState) -> dict[str, Any]:
        """Return the selector's state, and the roots of the elements by parameter."""
        roots = {name: piece.clone() for name, piece in state.by_name.items()}
        return {"inner": self.selector.save(state.inner), "roots": roots, "factor": state.factor}

    def load(self, saved: dict[str, Any]) -> ScaledElementsState:
        """Return the state that ``save`` described."""
        return ScaledElementsState(self.selector.load(saved["inner"]), dict(saved["roots"]), saved["factor"])

    def regroup(
        self, state: ScaledElementsState, old: Sequence[tuple[Layout, ScaledElementsState]], layout: Layout
    ) -> ScaledElementsState:
        """Return the state of the new bucket: the roots of its elements, wherever these were before."""
        inner = self._regrouped(state, old, layout)
        known = [kept for _, kept in old if any(name in layout.names for name in kept.by_name)]
        factor = max((kept.factor for kept in known), default=1.0)
        roots = {name: root * (kept.factor / factor) for kept in known for name, root in kept.by_name.items()}
        return ScaledElementsState(inner, {name: roots[name] for name in layout.names if name in roots}, factor)

    def rescale_(self, state: ScaledElementsState, factor: float) -> None:
        """Multiply the roots; see StatefulPart."""
        self.selector.rescale_(state.inner, factor)
        for roots in state.by_name.values():
            roots.mul_(factor)

    def scales(self, state: ScaledElementsState, acc: Tensor, step: Step, comm: Comm) -> Reduction[ElementScales]:
        """Return the roots of v, where all elements have one; else give the others that of their parameter first."""
        roots = state.of(step.layout, acc.device)
        if roots is None:
            layout, dtype = step.layout, torch.promote_types(acc.dtype, torch.float32)
            squares = yield from self.mean_squares(acc, step, comm)
            means = squares.sqrt().div_(state.factor).clamp_(max=torch.finfo(dtype).max).to(dtype)
            first = zip(layout.names, means, layout.numels, strict=True)
            known = state.by_name
            pieces = [known[name].to(means) if name in known else mean.expand(numel) for name, mean, numel in first]
            roots = state.fill(layout, pieces)
        return ElementScales(roots, state.factor, self.eps)

    def observe(
        self, state: ScaledElementsState, update: Tensor, step: Step, parts: Sequence[SparseValues] | None
    ) -> None:
        """Take the update into the running means of squares, once there are any."""
        ScalingSelector.observe(self, state, update, step, parts)
        roots = state.of(step.layout, update.device)
        if roots is None:
            return
        state.fade(roots, self.memory)
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
