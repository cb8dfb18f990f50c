"""The density asked for at each step."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.flat import Layout
from micro.parts import NoState, Rule, StatefulPart, check_rule

S = TypeVar("S")


def check_density(value: float, name: str = "density") -> None:
    """Raise ValueError unless ``value`` is a number in (0, 1]."""
    if not (isinstance(value, int | float) and 0 < value <= 1):
        raise ValueError(f"{name} must be in (0, 1], got {value}")


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked for in one step, the same on all ranks.

    Attributes:
        density: in (0, 1].
        count: k, the number of elements.
        layer_densities: one per parameter, where they differ.
    """

    density: float
    count: int
    layer_densities: tuple[float, ...] | None = None


class Density(StatefulPart[S], ABC):
    """A policy: how many elements to send at each step."""

    kind: ClassVar[str] = "density"
    home: ClassVar[str] = "micro.density"
    group: ClassVar[str] = "micro.densities"
    by_layer: ClassVar[bool] = False  # whether parameters are given densities of their own
    density: float

    @abstractmethod
    def target(self, state: S, grad: Tensor, step: int, layout: Layout, comm: Comm) -> Target:
        """Return what is asked for at ``step``.

        Args:
            state: the policy's own; may be changed.
            grad: (numel,) this rank's gradient, before it is accumulated; may hold NaN. Not modified.
            comm: every rank calls the same collectives in the same order.
        """


class DensitySchedule(Density[NoState]):
    """A density that depends on the number of the step alone."""

    @abstractmethod
    def at(self, step: int) -> float:
        """Return the target density of ``step``."""

    def target(self, state: NoState, grad: Tensor, step: int, layout: Layout, comm: Comm) -> Target:
        """Return the scheduled density and its number of elements."""
        density = self.at(step)
        return Target(density, target_count(density, grad.numel()))


@dataclass(frozen=True, slots=True)
class Constant(DensitySchedule):
    """The same density at every step."""

    density: float
    name: ClassVar[str] = "constant"

    def __post_init__(self) -> None:
        check_density(self.density)

    def at(self, step: int) -> float:
        """Return the target density of ``step``."""
        return self.density


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp(DensitySchedule):
    """Fall from ``start_density`` to ``density`` by a constant factor over ``steps`` steps.

    Args:
        stages: 0 changes the density at every step; m > 0 falls by m equal stairs, the first of them at
            ``start_density``. One stage per epoch of the warm-up is the source's schedule.

    Source: the exponential warm-up of Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887.
    Differences: counted in steps, which need not be epochs.

    Raises:
        ValueError: a density outside of (0, 1], or numbers of steps or stages out of range.
    """

    density: float
    start_density: float
    steps: int
    stages: int = 0
    name: ClassVar[str] = "warmup"

    def __post_init__(self) -> None:
        check_density(self.density)
        check_density(self.start_density, "start_density of the warm-up")
        if self.steps < 1:
            raise ValueError(f"steps of the warm-up must be at least 1, got {self.steps}")
        if not 0 <= self.stages <= self.steps:
            raise ValueError(f"stages of the warm-up must be in [0, {self.steps}], its steps, got {self.stages}")

    def at(self, step: int) -> float:
        """Return the target density of ``step``."""
        if step >= self.steps:
            return self.density  # not by the formula, whose rounding can cost one element
        done = step * self.stages // self.steps / self.stages if self.stages else step / self.steps
        return self.start_density * (self.density / self.start_density) ** done


@dataclass(slots=True)
class AccordionState:
    """The norm of each parameter's gradient at the last check, and whether it was critical then."""

    norms: tuple[float, ...] | None = None
    critical: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Accordion(Density[AccordionState]):
    """Send more of a layer in critical regimes, where its gradient's norm changes fast, and little elsewhere.

    Every ``interval`` steps the norm of each parameter's gradient is compared with that of the last check. A parameter
    is critical, until the next check, if it changed by more than ``change`` of itself, at the first check, and at the
    first check after one of ``decays``.

    Args:
        density, high: asked of a parameter outside and inside critical regimes.
        interval: steps from check to check.
        change: relative change of the norm, above which a regime is critical.
        decays: steps at which the learning rate falls.
        rule: 'repaired' takes the root of the mean square over all ranks, by one small all-reduce; 'published' the
            norm of rank 0's one mini-batch, broadcast.

    Source: Agarwal et al., Accordion, MLSys 2021, arXiv 2010.16248; public code of Yoon and Oh. Differences: the
    norm is of one step, not of gradients accumulated over an epoch, as in that code.

    Raises:
        ValueError: a density outside (0, 1], high below density, an interval below 1, a change not above 0, no such
            rule.
    """

    density: float
    high: float
    interval: int
    change: float = 0.5
    decays: tuple[int, ...] = ()
    rule: Rule = "repaired"
    name: ClassVar[str] = "accordion"
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

    def start(self) -> AccordionState:
        """Return a state before the first check."""
        return AccordionState()

    def target(self, state: AccordionState, grad: Tensor, step: int, layout: Layout, comm: Comm) -> Target:
        """Return the density of each parameter, and of the whole."""
        if step % self.interval == 0 or state.norms is None:
            self._check(state, grad, step, layout, comm)
        densities = tuple(self.high if critical else self.density for critical in state.critical)
        counts = (max(1, math.floor(d * numel + 1e-9)) for d, numel in zip(densities, layout.numels, strict=True))
        count = sum(counts)
        return Target(count / layout.numel, count, densities)

    def regroup(
        self, state: AccordionState, old: Sequence[tuple[Layout, AccordionState]], layout: Layout
    ) -> AccordionState:
        """Return what is known of the new bucket's parameters; where one of them is unknown, a state before a check."""
        known: dict[str, tuple[float, bool]] = {}
        for before, kept in old:
            if kept.norms is not None:
                known |= dict(zip(before.names, zip(kept.norms, kept.critical, strict=True), strict=True))
        if not all(name in known for name in layout.names):
            return self.start()
        norms, critical = zip(*(known[name] for name in layout.names), strict=True)
        return AccordionState(norms, critical)

    def _check(self, state: AccordionState, grad: Tensor, step: int, layout: Layout, comm: Comm) -> None:
        norms = self._norms(grad, layout, comm)
        if state.norms is None or any(step - self.interval < decay <= step for decay in self.decays):
            state.critical = (True,) * len(norms)
        else:
            pairs = zip(state.norms, norms, strict=True)
            state.critical = tuple(abs(before - now) > self.change * before for before, now in pairs)
        state.norms = norms

    def _norms(self, grad: Tensor, layout: Layout, comm: Comm) -> tuple[float, ...]:
        lengths = torch.tensor(layout.numels, device=grad.device)
        energy = torch.segment_reduce(grad.to(torch.float64).square(), "sum", lengths=lengths).nan_to_num_()
        if self.rule == "published":
            comm.broadcast_(energy, 0, "counts")
        else:
            comm.all_reduce_(energy, "counts").div_(comm.world_size)
        norms: list[float] = energy.sqrt().tolist()  # host sync: only at a check
        return tuple(norms)


def target_count(density: float, numel: int) -> int:
    """Return k, how many of ``numel`` elements to select: floor(density * numel), at least 1."""
    return max(1, math.floor(density * numel))
