"""What a reducer remembers of each bucket, kept by parameter name: DDP makes new buckets after its first step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from micro.flat import Layout
from micro.reducers.base import BucketState, Reducer, saved_layout


class BucketStates:
    """The states of a model's buckets on one rank.

    Args:
        reducer: whose states they are.
        parameters: of the model, by name.
    """

    def __init__(self, reducer: Reducer, parameters: Mapping[str, Tensor]) -> None:
        self._reducer = reducer
        self._parameters = parameters
        self._states: dict[tuple[str, ...], BucketState] = {}

    def of(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return the state of the bucket with these parameters; a new bucket takes over what was kept for them."""
        if layout.names not in self._states:
            self._states[layout.names] = self._reducer.rebuild(layout, self._remove(layout), dtype, device)
        return self._states[layout.names]

    def residuals(self) -> list[Tensor]:
        """Return the residuals, one vector per bucket, not copied; empty where the reducer keeps none."""
        return [state.residual for state in self._states.values()]

    def save(self) -> list[dict[str, Any]]:
        """Return the states as plain data and tensors."""
        return [self._reducer.save(state) for state in self._states.values()]

    def load(self, saved: list[dict[str, Any]]) -> None:
        """Put what ``save`` returned in place of all states.

        Raises:
            ValueError: it names parameters that the model does not have, or of other shapes.
        """
        layouts = [saved_layout(bucket) for bucket in saved]
        for layout in layouts:
            self._check(layout)
        self._states = {}
        for layout, bucket in zip(layouts, saved, strict=True):
            parameter = self._parameters[layout.names[0]]
            self._states[layout.names] = self._reducer.load(bucket, parameter.dtype, parameter.device)

    def _check(self, layout: Layout) -> None:
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            own = tuple(self._parameters[name].shape) if name in self._parameters else "none"
            if own != shape:
                raise ValueError(f"state holds '{name}' of shape {shape}, the model has {own}")

    def _remove(self, layout: Layout) -> list[BucketState]:
        """Return the old buckets that hold any of the layout's parameters; what else these hold stays here."""
        moving = set(layout.names)
        old = [state for names, state in self._states.items() if moving & set(names)]
        for state in old:
            del self._states[state.layout.names]
            staying = [
                pair for pair in zip(state.layout.names, state.layout.shapes, strict=True) if pair[0] not in moving
            ]
            if staying:  # until other new buckets take these over
                rest = Layout(tuple(name for name, _ in staying), tuple(shape for _, shape in staying))
                residual = state.residual
                self._states[rest.names] = self._reducer.rebuild(rest, [state], residual.dtype, residual.device)
        return old
