"""The density warmup: it falls to its final value over the first steps."""

from dataclasses import dataclass
from typing import ClassVar

from micro.density.base import DensitySchedule, check_density


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp(DensitySchedule):
    """Fall from ``start_density`` to ``density`` by a constant factor over ``steps`` steps.

    Args:
        stages: 0 changes the density at every step; m > 0 uses m stairs of equal length, the first at
            ``start_density``. The source uses one stage per epoch.

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
            return self.density  # not by the formula: its rounding could lose one element
        done = step * self.stages // self.steps / self.stages if self.stages else step / self.steps
        return float(self.start_density * (self.density / self.start_density) ** done)
