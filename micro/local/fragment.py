"""Weights that are exchanged together: where the round began, how far this rank is from there, and the outer step."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from micro.flat import Layout, real
from micro.local.outer import MakeOuter
from micro.reducers.base import BucketState, Reducer


class Fragment:
    """Parameters of one dtype as one vector of weights.

    Args:
        parameters: of the model, by name; they are written at the end of each round.

    Attributes:
        start: (numel,) the global weights, equal on all ranks, in single precision at least. Parameters of fewer bits
            hold them rounded.
        moved: (numel,) memory of the difference of weights, and then of the update.
        state: the reducer's.
        num_steps: inner steps since the parameters were the global weights.
    """

    def __init__(self, parameters: Mapping[str, Tensor], reducer: Reducer, outer: MakeOuter) -> None:
        self.parameters = dict(parameters)
        self.layout = Layout.of({name: real(p.detach()) for name, p in parameters.items()})
        first = next(iter(parameters.values()))
        self._dtype = real(first.detach()).dtype
        self._device = first.device
        wide = torch.promote_types(self._dtype, torch.float32)
        self.start = torch.empty(self.layout.numel, dtype=wide, device=self._device)
        self.moved = torch.zeros_like(self.start)
        self.num_steps = 0
        self._reducer = reducer
        self.state: BucketState = reducer.start(self.layout, wide, self._device)
        self.begin()
        self.outer = outer([self._weight(name) for name in self.layout.names])

    def _weight(self, name: str) -> Tensor:
        """Return a leaf that shares the memory of a parameter's global weights, and has the update for a gradient."""
        weight = torch.nn.Parameter(self.layout.views(self.start)[name])
        weight.grad = self.layout.views(self.moved)[name]
        return weight

    @torch.no_grad()
    def begin(self) -> None:
        """Take the parameters as they are for the global weights."""
        for name, weights in self.layout.views(self.start).items():
            weights.copy_(real(self.parameters[name].detach()))
        self.num_steps = 0

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Return how far this rank has moved (numel,): what its parameters began from, less what they are."""
        starts = self.layout.views(self.start)
        for name, moved in self.layout.views(self.moved).items():
            moved.copy_(starts[name].to(self._dtype)).sub_(real(self.parameters[name].detach()))
        return self.moved

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's difference of weights and the update in ``moved``, flat, parameter by parameter."""
        starts, updates = self.layout.views(self.start), self.layout.split(self.moved)
        for name, parameter in self.parameters.items():
            began = starts[name].to(self._dtype).to(self.start.dtype)
            yield (began - real(parameter.detach())).reshape(-1), updates[name]

    @torch.no_grad()
    def step(self) -> None:
        """Take the outer step by the update in ``moved``; the parameters become the new global weights."""
        self._round_start()
        self.outer.step()
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Give the parameters the global weights."""
        self.write(self.layout.views(self.start))
        self.num_steps = 0

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Give the parameters these values, by name."""
        for name, values in weights.items():
            real(self.parameters[name].detach()).copy_(values)

    def own_weights(self) -> dict[str, Tensor]:
        """Return copies of the parameters as they are, by name."""
        return {name: real(parameter.detach()).clone() for name, parameter in self.parameters.items()}

    def _round_start(self) -> None:
        """Forget what the parameters' dtype could not hold: workers began without it."""
        if self.start.dtype != self._dtype:
            self.start.copy_(self.start.to(self._dtype))

    @torch.no_grad()
    def is_finite(self) -> bool:
        """Tell whether all parameters are."""
        return all(bool(torch.isfinite(p).all()) for p in self.parameters.values())  # host sync: only after an error

    def outer_settings(self) -> dict[str, Any]:
        """Return the outer optimizer in words and numbers."""
        plain = (bool, int, float, str, tuple)
        groups = [{key: value for key, value in group.items() if isinstance(value, plain)} for group in self._groups()]
        return {"name": type(self.outer).__qualname__, "groups": groups}

    def _groups(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in g.items() if key != "params"} for g in self.outer.param_groups]

    def save(self) -> dict[str, Any]:
        """Return the state as plain data and tensors."""
        return {
            **self._reducer.save(self.state),
            "start": {name: piece.clone() for name, piece in self.layout.split(self.start).items()},
            "outer": self.outer.state_dict(),
            "num_steps": self.num_steps,
            "weights": self.own_weights() if self.num_steps else {},
        }

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what ``save`` returned: state, global weights, and the parameters where they had moved on."""
        self.state = self._reducer.load(dict(saved), self.start.dtype, self._device)
        for name, piece in self.layout.split(self.start).items():
            piece.copy_(saved["start"][name])
        self.outer.load_state_dict(saved["outer"])
        self.restart()
        self.write(saved["weights"])
        self.num_steps = int(saved["num_steps"])
