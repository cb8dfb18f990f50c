"""The density asked for at each step."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from torch import Tensor

from micro.comm import Comm
from micro.flat import Layout
from micro.parts import NoState, StatefulPart

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

    @abstractmethod
    def target(self, state: S, grad: Tensor, step: int, layout: Layout, comm: Comm) -> Target:
        """Return what is asked for at ``step``.

        Args:
            state: the policy's own; may be changed.
            grad: (numel,) this rank's gradient, before it is accumulated; may hold NaN. Not modified.
            comm: every rank calls the same collectives in the same order.
        """


class Schedule(Density[NoState]):
    """A density that depends on the number of the step alone."""

    @abstractmethod
    def at(self, step: int) -> float:
        """Return the target density of ``step``."""

    def target(self, state: NoState, grad: Tensor, step: int, layout: Layout, comm: Comm) -> Target:
        """Return the scheduled density and its number of elements."""
        density = self.at(step)
        return Target(density, target_count(density, grad.numel()))


@dataclass(frozen=True, slots=True)
class Constant(Schedule):
    """The same density at every step."""

    density: float
    name: ClassVar[str] = "constant"

    def __post_init__(self) -> None:
        check_density(self.density)

    def at(self, step: int) -> float:
        """Return the target density of ``step``."""
        return self.density


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp(Schedule):
    """Fall from ``start`` to ``density`` by a constant factor per step over ``steps`` steps.

    Source: the exponential warm-up of Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887.
    Differences: per step instead of per epoch.
    """

    density: float
    start_density: float
    steps: int
    name: ClassVar[str] = "warmup"

    def __post_init__(self) -> None:
        check_density(self.density)
        check_density(self.start_density, "start_density of the warm-up")
        if self.steps < 1:
            raise ValueError(f"steps of the warm-up must be at least 1, got {self.steps}")

    def at(self, step: int) -> float:
        """Return the target density of ``step``."""
        if step >= self.steps:
            return self.density  # not by the formula, whose rounding can cost one element
        return self.start_density * (self.density / self.start_density) ** (step / self.steps)


def target_count(density: float, numel: int) -> int:
    """Return k, how many of ``numel`` elements to select: floor(density * numel), at least 1."""
    return max(1, math.floor(density * numel))
