"""How long the elements of each parameter wait between two updates."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from micro.flat import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How often the elements of one parameter were updated.

    Attributes:
        numel: its elements.
        density: updates per element and step.
        median, tail: steps per update of the element in the middle, and of the one that a tenth waits longer than;
            infinite where that element was never updated.
        never: share of its elements that were never updated.
    """

    numel: int
    density: float
    median: float
    tail: float
    never: float


class Staleness:
    """Counts the updates of each element over the steps of a training.

    A dense reference says what any method can do: elements whose gradient is zero are not updated by it either. Costs
    an int32 vector of memory, and for each step a read of the update and one of the counts.

    Args:
        layout: names and shapes of the update's parameters.
        device: where updates are.
    """

    def __init__(self, layout: Layout, device: torch.device | str = "cpu") -> None:
        self.layout, self.num_steps = layout, 0
        self._counts = torch.zeros(layout.numel, dtype=torch.int32, device=device)

    def observe(self, update: Tensor) -> None:
        """Count the elements of a step's update (numel,) that are not zero."""
        self._counts += update != 0
        self.num_steps += 1

    def by_parameter(self) -> dict[str, Waits]:
        """Return what each parameter that has elements waited, by name.

        Raises:
            ValueError: no step was observed.
        """
        if not self.num_steps:
            raise ValueError("staleness of no step: call observe first")
        return {name: self._waits(self._counts[at]) for name, at in self.layout.slices() if at.start < at.stop}

    def _waits(self, counts: Tensor) -> Waits:
        ordered = counts.sort().values
        numel = ordered.numel()
        middle, rare = (int(ordered[math.ceil(share * numel) - 1]) for share in (0.5, 0.1))  # host sync: for a report
        return Waits(
            numel=numel,
            density=float(ordered.double().mean()) / self.num_steps,
            median=self._steps_per(middle),
            tail=self._steps_per(rare),
            never=float((ordered == 0).double().mean()),
        )

    def _steps_per(self, updates: int) -> float:
        return self.num_steps / updates if updates else math.inf
