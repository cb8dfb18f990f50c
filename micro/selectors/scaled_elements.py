"""ScaledElements: any selector by magnitude, given magnitudes in units of each element's own updates, as in Adam."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import AllReduce, Reduction
from micro.density.base import Target
from micro.predicted_traffic import Choosing
from micro.selectors.base import Selector, Traits
from micro.selectors.wrapping import WrappingSelector
from micro.values.flat import Layout
from micro.values.norms import norms_of
from micro.values.on_device import on_device
from micro.values.scales import ElementScales
from micro.values.sparse import Overlap, Selection, SparseValues, Step

SMALLEST_FACTOR = 2.0**-10  # of roots: below it they take it in, long before what is added to them would overflow


@dataclass(slots=True)
class ScalingState:
    """The state of the selector inside, and the roots of running means of squares.

    Attributes:
        by_name: those of each parameter (numel,): views of ``joined`` where there is that.
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
class ScaledElements(WrappingSelector[ScalingState]):
    """Select by the magnitude divided by ``sqrt(v) + eps``, with v the running mean square of the element's updates.

    Adam moves an element by about ``lr * update / (sqrt(v) + eps)``, whatever the size of its gradients. In these units
    elements compete by how far they would move. v is made as Adam makes it, from the mean update, which is sparse:
    ``v = memory * v + (1 - memory) * update ** 2`` in every step, zeros included, so that what is seldom updated is
    preferred. All ranks receive the same update, so no message is needed to keep v alike.

    Before its first update, an element's v is the mean square of its parameter's accumulator at the first selection,
    and fades as v does: at first elements compete by how far they stand out in their parameter. Ranks that share a
    threshold average these over all ranks; where a rank selects by itself, or leads, they are its own. A step that does
    not count is an update of zeros. Where v is zero, as in a parameter without a gradient at first, eps is the scale.
    The root of v stays finite.

    Costs per step: a vector of memory, of the residual's precision or float32, for the roots of v. They fade by a
    number that all have in common, so that a step changes those alone that it updates. MiCRO copies the slice that it
    searches, other selectors have the whole vector copied. Of messages one all-reduce of 8 L bytes for L parameters, in
    the first selection alone.

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
    state: ClassVar[type[ScalingState]] = ScalingState
    own_traits: ClassVar[Traits] = Traits.ALL_PARAMETERS

    def __post_init__(self) -> None:
        if not 0 < self.eps < math.inf:
            raise ValueError(f"eps of {self.name} must be positive, got {self.eps}")
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
            piece.mul_(factor)

    def effective_target(self, target: Target, layout: Layout) -> Target:
        """Return what the selector aims at."""
        return self.selector.effective_target(target, layout)

    def scales(self, state: ScalingState, acc: Tensor, step: Step, comm: Comm) -> Reduction[ElementScales]:
        """Return the roots of v, where all elements have one; else give the others that of their parameter first."""
        roots = state.of(step.layout, acc.device)
        if roots is None:
            layout, dtype = step.layout, torch.promote_types(acc.dtype, torch.float32)
            squares = yield from self._mean_squares(acc, step, comm)
            means = squares.sqrt().div_(state.factor).clamp_(max=torch.finfo(dtype).max).to(dtype)
            first = [mean.expand(numel) for mean, numel in zip(means, layout.numels, strict=True)]
            pieces = [state.by_name.get(name, own).to(means) for name, own in zip(layout.names, first, strict=True)]
            roots = state.join(layout, pieces)
        return ElementScales(roots, state.factor, self.eps)

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
        """Take the update into the running means of squares, once there are any."""
        self.selector.observe(state.inner, update, step, parts)
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

    def _mean_squares(self, acc: Tensor, step: Step, comm: Comm) -> Reduction[Tensor]:
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


def _grown(roots: Tensor, update: Tensor, weight: float) -> Tensor:
    """Return roots (m,) to whose squares those of an update (m,), times the square of ``weight``, were added."""
    added = update.to(roots.dtype) * weight
    return torch.hypot(roots, added).clamp_(max=torch.finfo(roots.dtype).max)
