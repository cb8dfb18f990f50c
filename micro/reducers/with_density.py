"""Reducers with a density, which may change from step to step, and a feedback."""

from collections.abc import Mapping
from typing import Any

import torch

from micro.density.base import Density
from micro.density.constant import Constant
from micro.feedback import Feedback
from micro.parts import StatefulPart
from micro.reducers.base import BucketState, Reducer
from micro.values.flat import Layout


class WithDensity(Reducer):
    """A reducer with a density, in (0, 1], or a policy of it, and a feedback."""

    density: Density[Any] | float
    feedback: Feedback

    @property
    def density_policy(self) -> Density[Any]:
        """The density as a policy."""
        return self.density if isinstance(self.density, Density) else Constant(self.density)

    @property
    def stateful_parts(self) -> Mapping[str, StatefulPart[Any]]:
        """The density; see Reducer."""
        return {"density": self.density_policy}

    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return a state with nothing kept."""
        memory = self.feedback.start(layout.numel, dtype, device)
        return BucketState(layout, 0, memory, **{name: part.start() for name, part in self.stateful_parts.items()})
