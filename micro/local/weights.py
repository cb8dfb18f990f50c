"""Weights of one dtype as one vector: where the round began, how far this rank is from there, and the outer step."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from micro.comm.ranks import Comm
from micro.comm.requests import Once
from micro.local.outer import MakeOuter
from micro.reducers.base import BucketState, Reducer
from micro.values.flat import Layout, real


class FlatWeights:
    """Parameters of one dtype as one vector of weights.

    Args:
        parameters: of the model, by name; they are written at the end of each round.

    Attributes:
        start: (numel,) the global weights, equal on all ranks, in single precision at least. Parameters of fewer bits
            hold them rounded.
        moved: (numel,) the difference of weights, and then the update; empty while nothing is exchanged.
        state: the reducer's.
        weight: of this rank's difference of weights in the mean, 1 where all ranks take as many steps.
    """

    def __init__(self, parameters: Mapping[str, Tensor], reducer: Reducer, outer: MakeOuter) -> None:
        self._parameters = dict(parameters)
        own = self._own()
        self.layout, first = Layout.of(own), next(iter(own.values()))
        self._dtype = first.dtype
        wide = torch.promote_types(first.dtype, torch.float32)
        self.start = torch.empty(self.layout.numel, dtype=wide, device=first.device)
        self.moved, self.weight = self.start.new_empty(0), 1.0
        self._reducer = reducer
        self.state: BucketState = reducer.start(self.layout, wide, first.device)
        self._once: Callable[[Callable[[], None]], object] = lambda work: work()
        self.restart()
        self._weights = [nn.Parameter(view) for view in self.layout.views(self.start).values()]
        self.outer = outer(list(self._weights))

    def share(self, first: "FlatWeights", comm: Comm) -> None:
        """Have the global weights and the outer optimizer in memory once, as those of ``first``, a simulated rank's.

        One of the ranks then changes them for all. Between two exchanges no rank may be a step ahead of another.
        """
        self.start, self._weights, self.outer = first.start, first._weights, first.outer
        self._once = lambda work: comm.answer(Once(work=work))

    def _own(self) -> dict[str, Tensor]:
        """Return the parameters as real numbers, by name; their memory may have been replaced since the last time."""
        return {name: real(parameter.detach()) for name, parameter in self._parameters.items()}

    def restart(self) -> None:
        """Take the parameters as they are, the same on all ranks, for the global weights."""
        self._once(self._take)

    @torch.no_grad()
    def _take(self) -> None:
        own = self._own()
        for name, weights in self.layout.views(self.start).items():
            weights.copy_(own[name])

    @torch.no_grad()
    def changed(self) -> list[str]:
        """Return the names of parameters that are not what the global weights made them."""
        own, starts = self._own(), self.layout.views(self.start)
        if self.start.device.type == "cpu":  # where no look waits, equal ones are left out at one reading
            starts = {
                name: start for name, start in starts.items() if not torch.equal(own[name], start.to(self._dtype))
            }
        found = [  # NaN is left to the exchange
            (own[name].ne(start.to(self._dtype)) & own[name].eq(own[name])).any() for name, start in starts.items()
        ]
        flags = torch.stack(found).tolist() if found else []  # host sync: once a round, before its first step
        return [name for name, differs in zip(starts, flags, strict=True) if differs]

    @torch.no_grad()
    def difference(self) -> Tensor:
        """Return how far this rank has moved (numel,): what its parameters began from, less what they are; weighted."""
        own, starts, found = self._own(), self.layout.views(self.start), torch.empty_like(self.start)
        for name, moved in self.layout.views(found).items():
            moved.copy_(starts[name].to(self._dtype)).sub_(own[name])
        return found if self.weight == 1 else found.mul_(self.weight)

    def step(self) -> None:
        """Take the outer step by the update in ``moved``, which is given up."""
        self._once(self._step)
        self.moved = self.start.new_empty(0)

    @torch.no_grad()
    def _step(self) -> None:
        if self.start.dtype != self._dtype:  # forget what the parameters could not hold: workers began without it
            self.start.copy_(self.start.to(self._dtype))
        for weight, update in zip(self._weights, self.layout.views(self.moved).values(), strict=True):
            weight.grad = update
        self.outer.step()
        for weight in self._weights:
            weight.grad = None

    @torch.no_grad()
    def mix(self, share: float) -> None:
        """Let the parameters become a ``share`` of the global weights and 1 - share of what they are."""
        starts = self.layout.views(self.start)
        if share == 1:  # a mixture would keep what is not finite
            self.write(starts)
            return
        for name, own in self._own().items():
            own.lerp_(starts[name].to(own.dtype), share)

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Give the parameters these values, by name."""
        own = self._own()
        for name, values in weights.items():
            own[name].copy_(values)

    def own_weights(self) -> dict[str, Tensor]:
        """Return copies of the parameters as they are, by name."""
        return {name: parameter.clone() for name, parameter in self._own().items()}

    def is_finite(self) -> bool:
        """Tell whether all parameters are."""
        return all(bool(torch.isfinite(p).all()) for p in self._own().values())  # host sync: only after an error

    def outer_settings(self) -> dict[str, Any]:
        """Return the outer optimizer in words and numbers."""
        plain = (bool, int, float, str, tuple)
        groups = [{key: each for key, each in g.items() if isinstance(each, plain)} for g in self.outer.param_groups]
        return {"name": type(self.outer).__qualname__, "groups": groups}

    def save(self, *, is_apart: bool) -> dict[str, Any]:
        """Return the state as plain data and tensors, with this rank's weights where it ``is_apart`` from the start."""
        return {
            **self._reducer.save(self.state),
            "start": {name: piece.clone() for name, piece in self.layout.split(self.start).items()},
            "outer": self.outer.state_dict(),
            "weights": self.own_weights() if is_apart else {},
            "moved": self.moved.clone(),
        }

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what ``save`` returned: state, global weights, and the parameters where they had moved on."""
        self.state = self._reducer.load(dict(saved), self.start.dtype, self.start.device)
        for name, piece in self.layout.split(self.start).items():
            piece.copy_(saved["start"][name])
        self.outer.load_state_dict(saved["outer"])
        self.moved = saved["moved"].to(self.start)
        self.mix(1.0)
        self.write(saved["weights"])
