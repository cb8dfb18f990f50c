"""ScaledElements: any selector by magnitude, given magnitudes in units of each element's own updates, as in Adam."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.flat import Layout
from micro.kernels.reference import limit
from micro.selectors.scaling import ScalingSelector
from micro.sparse import Selection, Step


@dataclass(slots=True)
class ScaledElementsState:
    """What `ScaledElements` keeps from step to step.

    Attributes:
        inner: the selector's state.
        by_name: the running mean square (numel of the parameter,) of each element's update, by parameter; views of
            ``squares`` where there are these.
        squares: (numel,) all of them in the order of the bucket; None after a change of buckets or of the process.
    """

    inner: Any
    by_name: dict[str, Tensor] = field(default_factory=dict)
    squares: Tensor | None = None

    def of(self, layout: Layout, device: torch.device) -> Tensor | None:
        """Return the mean squares (numel,) of a layout's elements on a device, or None where one has none yet."""
        if self.squares is None and all(name in self.by_name for name in layout.names):
            self.fill(layout, [self.by_name[name].to(device) for name in layout.names])
        return self.squares

    def fill(self, layout: Layout, pieces: Sequence[Tensor]) -> Tensor:
        """Keep the mean squares of each parameter (numel of it,), and return all of them (numel,)."""
        self.squares = torch.cat(list(pieces))
        self.by_name = layout.split(self.squares)
        return self.squares


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
    Where v is zero, as in a parameter without a gradient at first, eps is the scale. v stays below the largest number
    of its dtype.

    Costs per step: a vector v of memory, of the residual's precision, and one more while it selects; about eight reads
    or writes of a vector more; of messages one all-reduce of 8 L bytes for L parameters, in the first selection alone.

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

    def __post_init__(self) -> None:
        if not 0 < self.eps < math.inf:
            raise ValueError(f"eps of {self.name} must be positive, got {self.eps}")
        ScalingSelector.__post_init__(self)

    def start(self) -> ScaledElementsState:
        """Return a state that knows no scale yet."""
        return ScaledElementsState(self.selector.start())

    def save(self, state: ScaledElementsState) -> dict[str, Any]:
        """Return the selector's state, and the mean squares of the elements by parameter."""
        squares = {name: piece.clone() for name, piece in state.by_name.items()}
        return {"inner": self.selector.save(state.inner), "squares": squares}

    def load(self, saved: dict[str, Any]) -> ScaledElementsState:
        """Return the state that ``save`` described."""
        return ScaledElementsState(self.selector.load(saved["inner"]), dict(saved["squares"]))

    def regroup(
        self, state: ScaledElementsState, old: Sequence[tuple[Layout, ScaledElementsState]], layout: Layout
    ) -> ScaledElementsState:
        """Return the state of the new bucket: the mean squares of its elements, wherever these were before."""
        known = {name: piece for _, kept in old for name, piece in kept.by_name.items()}
        inner = self.selector.regroup(state.inner, [(bucket, kept.inner) for bucket, kept in old], layout)
        return ScaledElementsState(inner, {name: known[name] for name in layout.names if name in known})

    def choose(self, state: ScaledElementsState, acc: Tensor, step: Step, comm: Comm) -> Selection:
        """Return what the selector chooses of the accumulator in units of each element's scale."""
        return self.selector.select(state.inner, self._in_units(state, acc, step, comm), step, comm)

    def _in_units(self, state: ScaledElementsState, acc: Tensor, step: Step, comm: Comm) -> Tensor:
        """Return the accumulator (numel,) in units of each element's scale; what would be too large is cut."""
        squares = state.of(step.layout, acc.device)
        if squares is None:
            squares = self._begin(state, acc, step, comm)
        units = squares.sqrt().add_(self.eps)
        most = limit(acc.dtype)
        return torch.div(acc, units, out=units).clamp_(-most, most)

    def observe(self, state: ScaledElementsState, update: Tensor, step: Step) -> None:
        """Take the update into the running means of squares, once there are any."""
        ScalingSelector.observe(self, state, update, step)
        squares = state.of(step.layout, update.device)
        if squares is not None:
            wide = update.to(squares.dtype)
            squares.mul_(self.memory).addcmul_(wide, wide, value=1 - self.memory)
            squares.clamp_(max=torch.finfo(squares.dtype).max)

    def _begin(self, state: ScaledElementsState, acc: Tensor, step: Step, comm: Comm) -> Tensor:
        """Give elements without a mean square that of their parameter's accumulator; return all of them (numel,)."""
        layout = step.layout
        means = self.mean_squares(acc, step, comm).clamp_(max=torch.finfo(acc.dtype).max).to(acc.dtype)
        first = dict(zip(layout.names, zip(means, layout.numels, strict=True), strict=True))
        known = state.by_name
        pieces = [known[name].to(acc) if name in known else mean.expand(numel) for name, (mean, numel) in first.items()]
        return state.fill(layout, pieces)
