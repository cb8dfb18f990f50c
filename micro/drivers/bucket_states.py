"""What a reducer remembers of each bucket, kept by parameter name: DDP makes new buckets after its first step."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from micro.drivers.memory_order import as_in_memory, logical, orders_of_shards
from micro.reducers.base import BucketState, Reducer, saved_layout
from micro.values.flat import Layout


class BucketStates:
    """The states of a model's buckets on one rank.

    An old bucket stays whole until new ones hold all of its parameters: to copy what is left of it each time would take
    as many copies as there are buckets.

    Args:
        reducer: whose states they are.
        parameters: of the model, by name.
    """

    def __init__(self, reducer: Reducer, parameters: Mapping[str, Tensor]) -> None:
        self._reducer = reducer
        self._parameters = parameters
        self._states: dict[tuple[str, ...], BucketState] = {}
        self._old: list[BucketState] = []

    def of(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        """Return the state of the bucket with these parameters; a new bucket takes over what was kept for them."""
        if layout.names not in self._states:
            names = set(layout.names)
            former = [state for state in self._states.values() if not names.isdisjoint(state.layout.names)]
            holders = [state for state in self._old if not names.isdisjoint(self._unclaimed(state))]
            new = self._reducer.rebuild(layout, [*holders, *former], dtype, device)  # of two the later counts
            for state in former:
                del self._states[state.layout.names]
            self._states[layout.names] = new
            self._old = [state for state in [*self._old, *former] if self._unclaimed(state)]
        return self._states[layout.names]

    def residuals(self) -> list[Tensor]:
        """Return the residuals, one vector per bucket, not copied; empty where the reducer keeps none."""
        self._settle()
        return [state.residual for state in self._states.values()]

    def save(self) -> list[dict[str, Any]]:
        """Return the states as plain data and tensors, the elements of each parameter in logical order."""
        self._settle()
        saved = [self._reducer.save(state) for state in self._states.values()]
        return [logical(each, self._parameters) | self._orders(each) for each in saved]

    def _orders(self, bucket: dict[str, Any]) -> dict[str, Any]:
        orders = orders_of_shards(bucket, self._parameters)
        return {"orders": orders} if orders else {}

    def rescale_(self, factor: float) -> None:
        """Multiply all that is kept by ``factor``; see Reducer."""
        for state in self._all():
            self._reducer.rescale_(state, factor)

    def break_off(self, error: BaseException) -> None:
        """Note that ``error`` ended a step in its middle, so that no state is saved; loaded ones are whole."""
        for state in self._all():
            state.break_off(error)

    @property
    def step(self) -> int:
        """Steps done."""
        return max((state.step for state in self._states.values()), default=0)

    def load(self, saved: list[dict[str, Any]]) -> None:
        """Put what ``save`` returned in place of all states; where it does not fit, they stay as they are.

        Raises:
            ValueError: it names parameters that the model does not have, or of other shapes, or is of another method,
                or holds shards of parameters in another memory format.
        """
        states: dict[tuple[str, ...], BucketState] = {}
        for bucket in saved:
            layout = saved_layout(bucket)
            for name, shape in zip(layout.names, layout.shapes, strict=True):
                own = tuple(self._parameters[name].shape) if name in self._parameters else "none"
                if own != shape:
                    raise ValueError(f"state holds '{name}' of shape {shape}, the model has {own}")
            if bucket.get("orders", {}) != self._orders(bucket).get("orders", {}):
                raise ValueError(
                    "state holds shards of parameters in another memory format: load it into a model in that"
                )
            one = self._parameters[layout.names[0]]
            placed = as_in_memory(bucket, self._parameters)
            states[layout.names] = self._reducer.load(placed, one.dtype, one.device)
        self._states, self._old = states, []

    def _all(self) -> Iterable[BucketState]:
        return [*self._states.values(), *self._old]

    def _unclaimed(self, state: BucketState) -> list[str]:
        """Return the parameters of a state that no present bucket holds."""
        claimed = {name for names in self._states for name in names}
        return [name for name in state.layout.names if name not in claimed]

    def _settle(self) -> None:
        """Give what no new bucket has claimed a bucket of its own; after a step there is none of it as a rule."""
        for state in self._old:
            shapes = dict(zip(state.layout.names, state.layout.shapes, strict=True))
            names = tuple(self._unclaimed(state))
            rest = Layout(names, tuple(shapes[name] for name in names))
            residual = state.residual
            self._states[names] = self._reducer.rebuild(rest, [state], residual.dtype, residual.device)
        self._old = []
