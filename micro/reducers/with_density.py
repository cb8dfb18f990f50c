"""Reducers whose density may change from step to step: what all of them keep of it, and how."""

from typing import Any

import torch

from micro.density.base import Density
from micro.density.constant import Constant
from micro.feedback import Feedback
from micro.flat import Layout
from micro.reducers.base import BucketState, Reducer


class WithDensity(Reducer):
    """A reducer with a density, in (0, 1], or a policy of it, and a feedback; the density's state is saved with it."""

    density: Density[Any] | float
    feedback: Feedback

    @property
    def density_policy(self) -> Density[Any]:
        """The density as a policy."""
        return self.density if isinstance(self.density, Density) else Constant(self.density)

    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return a state with nothing kept."""
        memory = self.feedback.start(layout.numel, dtype, device)
        return BucketState(layout, 0, memory, density=self.density_policy.start())

    def save(self, state: BucketState) -> dict[str, Any]:
        """Return the state as plain data and tensors."""
        return Reducer.save(self, state) | {"density": self.density_policy.save(state.density)}

    def rescale_(self, state: BucketState, factor: float) -> None:
        """Multiply what is kept in units of gradients; see Reducer."""
        Reducer.rescale_(self, state, factor)
        self.density_policy.rescale_(state.density, factor)

    def load(self, saved: dict[str, Any], dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return the state that ``save`` described."""
        state = Reducer.load(self, saved, dtype, device)
        if "density" in saved:
            state.density = self.density_policy.load(saved["density"])
        return state
