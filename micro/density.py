"""The density asked for at each step."""

import math
from dataclasses import dataclass


def check_density(value: float, name: str = "density") -> None:
    """Raise ValueError unless ``value`` is a number in (0, 1]."""
    if not (isinstance(value, int | float) and 0 < value <= 1):
        raise ValueError(f"{name} must be in (0, 1], got {value}")


@dataclass(frozen=True, slots=True)
class Constant:
    """The same density at every step."""

    density: float

    def __post_init__(self) -> None:
        check_density(self.density)

    def at(self, step: int) -> float:
        """Return the target density of ``step``."""
        return self.density


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Fall from ``start`` to ``density`` by a constant factor per step over ``steps`` steps.

    Source: the exponential warm-up of Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887.
    Differences: per step instead of per epoch.
    """

    density: float
    start: float
    steps: int

    def __post_init__(self) -> None:
        check_density(self.density)
        check_density(self.start, "start density of the warm-up")
        if self.steps < 1:
            raise ValueError(f"steps of the warm-up must be at least 1, got {self.steps}")

    def at(self, step: int) -> float:
        """Return the target density of ``step``."""
        if step >= self.steps:
            return self.density  # not by the formula, whose rounding can cost one element
        return self.start * (self.density / self.start) ** (step / self.steps)


Density = Constant | WarmUp


def target_count(density: float, numel: int) -> int:
    """Return k, how many of ``numel`` elements to select: floor(density * numel), at least 1."""
    return max(1, math.floor(density * numel))
