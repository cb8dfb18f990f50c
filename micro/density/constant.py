"""The density constant: the same density at every step."""

from dataclasses import dataclass
from typing import ClassVar

from micro.density.base import DensitySchedule, check_density


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
