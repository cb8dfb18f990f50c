"""What a reducer remembers of each bucket, kept by parameter name: DDP makes new buckets after its first step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from micro.drivers.memory_order import as_in_memory, logical
from micro.flat import Layout
from micro.reducers.base import BucketState, Reducer, saved_layout


@dataclass(slots=True)
class _Leaving:
    """An old bucket, and the names of its parameters that no new bucket has claimed yet."""

    state: BucketState
    unclaimed: set[str]


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
        self._leaving: list[_Leaving] = []

    def of(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return the state of the bucket with these parameters; a new bucket takes over what was kept for them."""
        if layout.names not in self._states:
            state = self._reducer.rebuild(layout, self._holders(layout), dtype, device)
            self._claim(layout)
            self._states[layout.names] = state
        return self._states[layout.names]

    def residuals(self) -> list[Tensor]:
        """Return the residuals, one vector per bucket, not copied; empty where the reducer keeps none."""
        self._settle()
        return [state.residual for state in self._states.values()]

    def save(self) -> list[dict[str, Any]]:
        """Return the states as plain data and tensors, the elements of each parameter in logical order."""
        self._settle()
        return [logical(self._reducer.save(state), self._parameters) for state in self._states.values()]

    def rescale_(self, factor: float) -> None:
        """Multiply all that is kept by ``factor``; see Reducer."""
        for state in [*self._states.values(), *(old.state for old in self._leaving)]:
            self._reducer.rescale_(state, factor)

    def break_off(self, error: BaseException) -> None:
        """Note that ``error`` ended a step in its middle, so that no state is saved; loaded ones are whole."""
        for state in [*self._states.values(), *(old.state for old in self._leaving)]:
            state.break_off(error)

    @property
    def step(self) -> int:
        """Steps done."""
        return max((state.step for state in self._states.values()), default=0)

    def load(self, saved: list[dict[str, Any]]) -> None:
        """Put what ``save`` returned in place of all states; where it does not fit, they stay as they are.

        Raises:
            ValueError: it names parameters that the model does not have, or of other shapes, or is of another method.
        """
        layouts = [saved_layout(bucket) for bucket in saved]
        for layout in layouts:
            self._check(layout)
        states: dict[tuple[str, ...], BucketState] = {}
        for layout, bucket in zip(layouts, saved, strict=True):
            parameter = self._parameters[layout.names[0]]
            states[layout.names] = self._reducer.load(
                as_in_memory(bucket, self._parameters), parameter.dtype, parameter.device
            )
        self._states, self._leaving = states, []

    def _check(self, layout: Layout) -> None:
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            own = tuple(self._parameters[name].shape) if name in self._parameters else "none"
            if own != shape:
                raise ValueError(f"state holds '{name}' of shape {shape}, the model has {own}")

    def _holders(self, layout: Layout) -> list[BucketState]:
        """Return the states that hold any of the layout's parameters, the oldest first: the later ones count."""
        wanted = set(layout.names)
        leaving = [old.state for old in self._leaving if wanted & old.unclaimed]
        return [*leaving, *(state for names, state in self._states.items() if not wanted.isdisjoint(names))]

    def _claim(self, layout: Layout) -> None:
        """Note that a new bucket has taken these parameters over. An old bucket goes when the last of its own is taken.

        Until then it stays whole: to copy what is left of it at each claim would take as many copies as there are
        buckets.
        """
        claimed = set(layout.names)
        for names in [names for names in self._states if not claimed.isdisjoint(names)]:
            self._leaving.append(_Leaving(self._states.pop(names), set(names)))
        for old in self._leaving:
            old.unclaimed -= claimed
        self._leaving = [old for old in self._leaving if old.unclaimed]

    def _settle(self) -> None:
        """Give what no new bucket has claimed a bucket of its own; after a step there is none of it as a rule."""
        for state, unclaimed in ((old.state, old.unclaimed) for old in self._leaving):
            pairs = zip(state.layout.names, state.layout.shapes, strict=True)
            names, shapes = zip(*((name, shape) for name, shape in pairs if name in unclaimed), strict=True)
            rest = Layout(names, shapes)
            residual = state.residual
            self._states[rest.names] = self._reducer.rebuild(rest, [state], residual.dtype, residual.device)
        self._leaving = []
