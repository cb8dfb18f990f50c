"""The selector scaled_elements: another selector on magnitudes divided by Adam's scale sqrt(v) of each element."""

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
from micro.values.finite import on_device
from micro.values.flat import Layout
from micro.values.norms import norms_of, rows_of
from micro.values.scales import ElementScales
from micro.values.sparse import Overlap, Selection, SparseValues, Step

SMALLEST_FACTOR = 2.0**-10  # below it, roots are multiplied by it, long before new terms could overflow


@dataclass(slots=True)
class ScalingState:
    """The inner selector's state, and the roots sqrt(v) of running means of squares.

    Attributes:
        by_name: roots of each parameter (numel,), views of ``joined`` if that exists.
        factor: common factor of all roots, in (0, 1].
        joined: all roots in the order of the bucket; None after a change of buckets or a load.
    """

    inner: Any
    by_name: dict[str, Tensor] = field(default_factory=dict)
    factor: float = 1.0
    joined: Tensor | None = None

    def of(self, layout: Layout, device: torch.device) -> Tensor | None:
        """Return the roots of a layout's parameters on a device, or None if a parameter has none yet."""
        if self.joined is None and all(name in self.by_name for name in layout.names):
            self.join(layout, [self.by_name[name].to(device) for name in layout.names])
        return self.joined

    def join(self, layout: Layout, pieces: Sequence[Tensor]) -> Tensor:
        """Store a copy of ``pieces``, one per parameter, and return it as one vector."""
        self.joined = torch.cat(list(pieces))
        parts = self.joined.split([piece.numel() for piece in pieces])
        self.by_name = dict(zip(layout.names, parts, strict=True))
        return self.joined


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledElements(WrappingSelector[ScalingState]):
    """Select by the magnitude divided by ``sqrt(v) + eps``, with v the running mean square of the element's updates.

    Adam moves an element by about ``lr * update / (sqrt(v) + eps)``, whatever the size of its gradients. In these units
    elements compete by how far they would move. As in Adam, but with the sparse mean update, ``v = memory * v + (1 -
    memory) * update ** 2`` in every step, including zeros, so rarely updated elements are preferred. All ranks receive
    the same update, so v stays equal without messages.

    v starts as the mean square of the parameter's accumulator at the first selection: at first elements compete by how
    much they exceed their parameter's typical magnitude. Ranks that share a threshold average these means over ranks;
    otherwise each rank, or the leader, uses its own. A skipped step counts as an update of zeros. If v is zero, as for
    a parameter without a gradient at first, the scale is eps. sqrt(v) stays finite.

    Costs per step: memory for sqrt(v), a vector in the residual's precision or float32. A common factor applies the
    decay, so a step changes only updated elements. MiCRO copies the slice that it searches, other selectors the whole
    vector. One all-reduce of 8 L bytes for L parameters, in the first selection only.

    Args:
        selector: selects from the scaled vector: a part, its name, or a mapping.
        memory: decay of v per step, in [0, 1): the optimizer's second beta.
        eps: the optimizer's, positive.

    Statistics: no threshold, because it does not apply to magnitudes.

    Source: this project; the scale is from Kingma and Ba, Adam, ICLR 2015, arXiv 1412.6980, without bias correction,
    which is equal for all elements.

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
        """Return why scaling has no effect or no meaning for a selector, or None if it works."""
        if selector.traits & (Traits.BY_PARAMETER | Traits.ALL_PARAMETERS):
            return "already weights each parameter"
        if selector.overlap is Overlap.SAME:
            return "does not select by magnitude"
        return "fits a distribution to the unscaled accumulator" if Traits.WANTS_SUMS in selector.traits else None

    def start(self) -> ScalingState:
        """Return a state without scales."""
        return ScalingState(self.selector.start())

    def save(self, state: ScalingState) -> dict[str, Any]:
        """Return the inner selector's state, and the scales by parameter."""
        by_name = {name: piece.clone() for name, piece in state.by_name.items()}
        return {"inner": self.selector.save(state.inner), "by_name": by_name, "factor": state.factor}

    def load(self, saved: dict[str, Any]) -> ScalingState:
        """Return the state that ``save`` described."""
        by_name = {name: piece.clone() for name, piece in saved["by_name"].items()}  # rescale_ changes them in place
        return ScalingState(self.selector.load(saved["inner"]), by_name, saved["factor"])

    def regroup(self, state: ScalingState, old: Sequence[tuple[Layout, ScalingState]], layout: Layout) -> ScalingState:
        """Return the state of the new bucket, with its parameters' scales from their old buckets."""
        inner = self.selector.regroup(state.inner, [(bucket, kept.inner) for bucket, kept in old], layout)
        known = [kept for _, kept in old if any(name in layout.names for name in kept.by_name)]
        factor = max((kept.factor for kept in known), default=1.0)
        by_name = {name: piece * (kept.factor / factor) for kept in known for name, piece in kept.by_name.items()}
        return ScalingState(inner, {name: by_name[name] for name in layout.names if name in by_name}, factor)

    def rescale_(self, state: ScalingState, factor: float) -> None:
        """Multiply the scales; see StatefulPart."""
        self.selector.rescale_(state.inner, factor)
        for piece in state.by_name.values():
            piece.mul_(factor)

    def effective_target(self, target: Target, layout: Layout) -> Target:
        """Return the inner selector's target."""
        return self.selector.effective_target(target, layout)

    def scales(self, state: ScalingState, acc: Tensor, step: Step, comm: Comm) -> Reduction[ElementScales]:
        """Return sqrt(v) of all elements; those without one first get that of their parameter."""
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
        """Return the inner selector's choice from the scaled accumulator."""
        scales = yield from self.scales(state, acc, step, comm)
        if Traits.TAKES_SCALES in self.selector.traits:
            step = replace(step, scales=scales)
        else:
            acc = scales.scaled(acc)
        chosen = yield from self.selector.select(state.inner, acc, step, comm)
        return replace(chosen, threshold=None)

    def observe(self, state: ScalingState, update: Tensor, step: Step, parts: Sequence[SparseValues] | None) -> None:
        """Add the update to the running means of squares, once they exist."""
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
            roots.copy_(_add_squares(roots, update, weight))
        elif parts:
            places = torch.cat([part.indices for part in parts]).long()
            grown = _add_squares(roots.index_select(0, places), update.index_select(0, places), weight)
            roots.index_copy_(0, places, grown)  # duplicates have equal values

    def _mean_squares(self, acc: Tensor, step: Step, comm: Comm) -> Reduction[Tensor]:
        """Return each parameter's mean square (L,) float64, averaged over ranks that share a threshold."""
        rows, numels = step.layout.kept(_rows_and_numels, acc.device)
        squares = norms_of(acc, rows).square_() / numels
        if self.overlap is not Overlap.DISJOINT:
            return squares
        total: Tensor = yield AllReduce(mine=squares, kind="counts")
        return total / comm.world_size

    def volume(self, layout: Layout, density: float, world_size: int) -> Choosing:
        """Return the inner selector's messages; see Selector. The scales' own message is not sent in every step."""
        return self.selector.volume(layout, density, world_size)


def _rows_and_numels(layout: Layout, device: torch.device) -> tuple[tuple[tuple[int, int], ...], Tensor]:
    """Return the runs of equal parameters, and the parameters' lengths (L,) float64, 1 where they are empty."""
    numels = [max(numel, 1) for numel in layout.numels]
    return rows_of(layout.numels), on_device(numels, torch.float64, device)


def _add_squares(roots: Tensor, update: Tensor, weight: float) -> Tensor:
    """Return sqrt(roots**2 + (weight * update)**2), elementwise (m,)."""
    added = update.to(roots.dtype) * weight
    return torch.hypot(roots, added).clamp_(max=torch.finfo(roots.dtype).max)
