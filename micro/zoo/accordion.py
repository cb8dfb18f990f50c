"""Accordion: more of a layer while its gradient's norm changes fast."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.density.base import Density, Target, check_density, target_count
from micro.flat import Layout
from micro.parts import Rule, check_rule
from micro.requests import AllReduce, Broadcast, Reduction


@dataclass(slots=True)
class AccordionState:
    """The norm of each parameter's gradient at the last check, and whether it was critical then."""

    norms: tuple[float, ...] | None = None
    critical: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Accordion(Density[AccordionState]):
    """Send more of a layer in critical regimes, where its gradient's norm changes fast, and little otherwise.

    Every ``interval`` steps the norm of each parameter's gradient is compared with that of the last check. A parameter
    is critical, until the next check, if it changed by more than ``change`` of itself, at the first check, and at the
    first check after one of ``decays``.

    Args:
        density, high: of a parameter outside and inside critical regimes.
        interval: steps from check to check.
        change: relative change of the norm, above which a regime is critical.
        decays: steps at which the learning rate falls.
        rule: 'repaired': the norm is the root mean square over all ranks, by one small all-reduce. 'published': that of
            rank 0's mini-batch, which it broadcasts.

    Source: Agarwal et al., Accordion, MLSys 2021, arXiv 2010.16248; public code of Yoon and Oh. Differences: the norm
    is of one step, not of gradients accumulated over an epoch, as in that code, and of all ranks by default.

    Raises:
        ValueError: a density outside (0, 1], high below density, an interval below 1, a change not above 0.
    """

    density: float
    high: float
    interval: int
    change: float = 0.5
    decays: tuple[int, ...] = ()
    rule: Rule = "repaired"
    name: ClassVar[str] = "accordion"
    state: ClassVar[type[AccordionState]] = AccordionState
    by_layer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_rule(self)
        check_density(self.density)
        check_density(self.high, "high density of accordion")
        if self.high < self.density:
            raise ValueError(f"high density of accordion must be at least density {self.density}, got {self.high}")
        if self.interval < 1:
            raise ValueError(f"interval of accordion must be at least 1 step, got {self.interval}")
        if not self.change > 0:
            raise ValueError(f"change of accordion must be above 0, got {self.change}")

    def target(self, state: AccordionState, grad: Tensor, step: int, layout: Layout, comm: Comm) -> Reduction[Target]:
        """Return the density of each parameter, and of the whole."""
        if step % self.interval == 0 or state.norms is None:
            yield from self._check(state, grad, step, layout, comm)
        densities = tuple(self.high if critical else self.density for critical in state.critical)
        pairs = zip(densities, layout.numels, strict=True)
        count = sum(target_count(density, numel) for density, numel in pairs if numel)
        return Target(count / layout.numel, count, densities)

    def regroup(
        self, state: AccordionState, old: Sequence[tuple[Layout, AccordionState]], layout: Layout
    ) -> AccordionState:
        """Return what is known of the new bucket's parameters; if one of them is unknown, a state before a check."""
        known: dict[str, tuple[float, bool]] = {}
        for before, kept in old:
            if kept.norms is not None:
                known |= dict(zip(before.names, zip(kept.norms, kept.critical, strict=True), strict=True))
        if not all(name in known for name in layout.names):
            return self.start()
        norms, critical = zip(*(known[name] for name in layout.names), strict=True)
        return AccordionState(norms, critical)

    def rescale_(self, state: AccordionState, factor: float) -> None:
        """Multiply the norms; see StatefulPart."""
        if state.norms is not None:
            state.norms = tuple(norm * factor for norm in state.norms)

    def _check(self, state: AccordionState, grad: Tensor, step: int, layout: Layout, comm: Comm) -> Reduction[None]:
        norms = yield from self._norms(grad, layout, comm)
        if state.norms is None or any(step - self.interval < decay <= step for decay in self.decays):
            state.critical = (True,) * len(norms)
        else:
            pairs = zip(state.norms, norms, strict=True)
            state.critical = tuple(abs(before - now) > self.change * before for before, now in pairs)
        state.norms = norms

    def _norms(self, grad: Tensor, layout: Layout, comm: Comm) -> Reduction[tuple[float, ...]]:
        lengths = torch.tensor(layout.numels, device=grad.device)
        energy = torch.segment_reduce(grad.to(torch.float64).square(), "sum", lengths=lengths).nan_to_num_()
        if self.rule == "published":
            energy = yield Broadcast(mine=energy, source=0, kind="counts")
        else:
            energy = (yield AllReduce(mine=energy, kind="counts")).div_(comm.world_size)
        return tuple(energy.sqrt().tolist())  # host sync: only at a check
