"""The base class of density policies, which set how many elements to send at each step; and the constant one."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.parts import NoState, StatefulPart
from micro.values.flat import Layout

S = TypeVar("S")


def check_density(value: float, name: str = "density") -> None:
    """Raise ValueError unless ``value`` is a number in (0, 1]."""
    if not (isinstance(value, int | float) and 0 < value <= 1):
        raise ValueError(f"{name} must be in (0, 1], got {value}")


@dataclass(frozen=True, slots=True)
class Target:
    """How much to send in one step, the same on all ranks.

    Attributes:
        density: in (0, 1].
        count: k, the number of elements.
        layer_densities: one per parameter, if they differ.
    """

    density: float
    count: int
    layer_densities: tuple[float, ...] | None = None


class Density(StatefulPart[S], ABC):
    """A policy: how many elements to send at each step."""

    kind: ClassVar[str] = "density"
    home: ClassVar[str] = "micro.density"
    group: ClassVar[str] = "micro.densities"
    by_layer: ClassVar[bool] = False  # whether each parameter has its own density
    density: float

    def check_parameters(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError if the settings do not fit the trained parameters; by default every model fits.

        Raises:
            ValueError: a setting names parameters that the model does not have.
        """

    def settled(self, layout: Layout) -> Target:
        """Return the target in steady state: the final one, or the lower one if the density alternates."""
        return Target(self.density, target_count(self.density, layout.numel))

    @abstractmethod
    def target(self, state: S, grad: Tensor, step: int, layout: Layout, comm: Comm) -> Reduction[Target]:
        """Yield requests to the other ranks, and return how much to send at ``step``.

        Args:
            state: the policy's state; may be changed.
            grad: (numel,) this rank's gradient, before it is accumulated; may contain NaN. Not modified.
            comm: the ranks. All make the same requests in the same order.
        """


class DensitySchedule(Density[NoState]):
    """A density that depends only on the step number."""

    @abstractmethod
    def at(self, step: int) -> float:
        """Return the target density of ``step``."""

    def target(self, state: NoState, grad: Tensor, step: int, layout: Layout, comm: Comm) -> Reduction[Target]:
        """Return the scheduled density and its number of elements."""
        yield from ()
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


def target_count(density: float, numel: int) -> int:
    """Return k, the number of elements to select: floor(density * numel), at least 1."""
    return max(1, math.floor(density * numel + 1e-9))  # 1e-9, because 0.29 * 100 < 29 in floating point
