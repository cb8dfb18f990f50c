"""The global weights as one vector per dtype: compute this rank's difference from them, and take the outer step."""

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
        parameters: of the model, by name; written at the end of each round.

    Attributes:
        start: (numel,) the global weights, equal on all ranks, in at least single precision. Half-precision parameters
            hold them rounded.
        moved: (numel,) the weight difference, then the update; empty between exchanges.
        state: the reducer's state.
        weight: factor of this rank's difference in the mean, 1 if all ranks take equally many steps.
    """

    def __init__(self, parameters: Mapping[str, Tensor], reducer: Reducer, outer: MakeOuter) -> None:
        self._parameters = dict(parameters)
        own = self._parameters_by_name()
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
        """Share the global weights and the outer optimizer with ``first``, another simulated rank.

        One rank then updates them for all. Between two exchanges no rank may be a step ahead of another.
        """
        self.start, self._weights, self.outer = first.start, first._weights, first.outer
        self._once = lambda work: comm.answer(Once(work=work))

    def _parameters_by_name(self) -> dict[str, Tensor]:
        """Return real views of the parameters, by name; their memory may have been replaced since the last call."""
        return {name: real(parameter.detach()) for name, parameter in self._parameters.items()}

    def restart(self) -> None:
        """Make the current parameters, equal on all ranks, the global weights."""
        self._once(self._take)

    @torch.no_grad()
    def _take(self) -> None:
        own = self._parameters_by_name()
        for name, weights in self.layout.views(self.start).items():
            weights.copy_(own[name])

    @torch.no_grad()
    def changed(self) -> list[str]:
        """Return the names of parameters that differ from the (rounded) global weights."""
        own, starts = self._parameters_by_name(), self.layout.views(self.start)
        if self.start.device.type == "cpu":  # without device waits, equal ones are skipped after one read
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
        """Return this rank's weighted difference (numel,): weights at the start of the round minus current ones."""
        own, starts, found = self._parameters_by_name(), self.layout.views(self.start), torch.empty_like(self.start)
        for name, moved in self.layout.views(found).items():
            moved.copy_(starts[name].to(self._dtype)).sub_(own[name])
        return found if self.weight == 1 else found.mul_(self.weight)

    def step(self) -> None:
        """Take the outer step with the update in ``moved``, then clear it."""
        self._once(self._step)
        self.moved = self.start.new_empty(0)

    @torch.no_grad()
    def _step(self) -> None:
        if self.start.dtype != self._dtype:  # drop what the parameters could not represent: workers started without it
            self.start.copy_(self.start.to(self._dtype))
        for weight, update in zip(self._weights, self.layout.views(self.moved).values(), strict=True):
            weight.grad = update
        self.outer.step()
        for weight in self._weights:
            weight.grad = None

    @torch.no_grad()
    def mix(self, share: float) -> None:
        """Set the parameters to share * global weights + (1 - share) * parameters."""
        starts = self.layout.views(self.start)
        if share == 1:  # a mixture would keep what is not finite
            self.write(starts)
            return
        for name, own in self._parameters_by_name().items():
            own.lerp_(starts[name].to(own.dtype), share)

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Set the parameters to these values, by name."""
        own = self._parameters_by_name()
        for name, values in weights.items():
            own[name].copy_(values)

    def own_weights(self) -> dict[str, Tensor]:
        """Return copies of the current parameters, by name."""
        return {name: parameter.clone() for name, parameter in self._parameters_by_name().items()}

    def is_finite(self) -> bool:
        """Return whether all parameters are finite."""
        return all(
            bool(torch.isfinite(p).all()) for p in self._parameters_by_name().values()
        )  # host sync: only after an error

    def outer_settings(self) -> dict[str, Any]:
        """Return the outer optimizer's class and settings as plain data."""
        plain = (bool, int, float, str, tuple)
        groups = [{key: each for key, each in g.items() if isinstance(each, plain)} for g in self.outer.param_groups]
        return {"name": type(self.outer).__qualname__, "groups": groups}

    def save(self, *, has_local_progress: bool) -> dict[str, Any]:
        """Return the state as plain data and tensors, with the weights of a rank with local progress."""
        return {
            **self._reducer.save(self.state),
            "start": {name: piece.clone() for name, piece in self.layout.split(self.start).items()},
            "outer": self.outer.state_dict(),
            "weights": self.own_weights() if has_local_progress else {},
            "moved": self.moved.clone(),
        }

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any]) -> None:
        """Load what ``save`` returned: state, global weights, and this rank's parameters if they differed."""
        self.state = self._reducer.load(dict(saved), self.start.dtype, self.start.device)
        for name, piece in self.layout.split(self.start).items():
            piece.copy_(saved["start"][name])
        self.outer.load_state_dict(saved["outer"])
        self.moved = saved["moved"].to(self.start)
        self.mix(1.0)
        self.write(saved["weights"])
