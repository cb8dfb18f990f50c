"""The base class of optimizers for sparse updates, which counts how many steps each element waited."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from micro.drivers.arrivals import arrival_of

LONGEST = torch.iinfo(torch.int16).max  # longest counted wait, in steps
FEW = 8  # if fewer than 1 of 8 elements arrived, a CPU computes only with those
WAITED = "waited"


@dataclass(frozen=True, slots=True)
class Received:
    """The gradient that arrived for one parameter.

    Attributes:
        parameter, grad: this rank's shard if they are sharded.
        state: of the optimizer for this parameter.
        tau: steps that each element waited for its value, 0 for elements without one, in the parameter's shape and
            single precision; None if all elements have a value and none had waited.
    """

    parameter: Tensor
    grad: Tensor
    state: dict[str, Any]
    tau: Tensor | None

    def part(self, names: Iterable[str]) -> tuple[list[Tensor], Callable[[list[Tensor]], None] | None]:
        """Return the tensors to compute with: parameter, gradient, tau, named states; and a function to write back.

        On a CPU with few arrivals these are copies of the arrived elements. Otherwise they are the tensors themselves,
        and the function is None.
        """
        assert self.tau is not None
        whole = [self.parameter, self.grad, self.tau, *(local(self.state[name]) for name in names)]
        if self.tau.is_cuda or any(each.stride() != self.tau.stride() for each in whole) or not is_dense(self.tau):
            return whole, None
        flat = [in_memory(each) for each in whole]
        chosen = flat[2].nonzero().view(-1)
        if chosen.numel() * FEW > self.tau.numel():
            return whole, None

        def put_back(parts: list[Tensor]) -> None:
            for number in (0, *range(3, len(flat))):
                flat[number].index_copy_(0, chosen, parts[number])

        return [each.index_select(0, chosen) for each in flat], put_back


class WaitingOptimizer(Optimizer):
    """Counts for each element how many steps it waited for its value.

    The attachment that reduced the gradient reports which elements arrived; without one, all with a gradient other than
    zero have. The counts, two bytes per element, exist only while any element waits.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update each parameter that has a gradient; return what ``closure`` returns.

        Raises:
            ValueError: a gradient is sparse (torch.sparse) or complex, or the attachment does not send sums of
                gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            received = list(self._received(group))
            whole = [each for each in received if each.tau is None]
            if whole:
                self._update_whole_(whole, group)
            if len(whole) < len(received):
                self._update_(_by_dtype([each for each in received if each.tau is not None]), group)
        return loss

    def _start(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter before its first step; by default {}."""
        return {}

    def _counts_waits(self, group: dict[str, Any]) -> bool:
        """Return whether a group's parameters need counts of waits."""
        return True

    def _update_whole_(self, received: list[Received], group: dict[str, Any]) -> None:
        """Update parameters of which all elements arrived and none had waited."""
        raise NotImplementedError

    def _update_(self, received: Iterable[list[Received]], group: dict[str, Any]) -> None:
        """Update parameters of which some elements arrived or had waited, in lists of one dtype and device."""
        raise NotImplementedError

    def _received(self, group: dict[str, Any]) -> Iterator[Received]:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state, grad = self.state[parameter], local(parameter.grad)
            if not self._counts_waits(group):
                yield Received(local(parameter), grad, state, None)
                continue
            if parameter.grad.is_sparse or parameter.is_complex():
                kind = "sparse" if parameter.grad.is_sparse else "complex"
                raise ValueError(f"{type(self).__name__} takes dense real gradients, got a {kind} one: use another")
            arrival = arrival_of(parameter)
            if arrival is not None and arrival.refusal is not None:
                raise ValueError(
                    f"{type(self).__name__} takes sums of the gradients that waited, {arrival.refusal}: "
                    "use feedback residual, or torch.optim.AdamW"
                )
            if not state:
                state.update(self._start(parameter))
            tau: Tensor | None
            if arrival is None:
                tau = waited(state, parameter, grad != 0)
            elif not arrival.is_whole:
                tau = waited(state, parameter, in_shape_of(local(parameter), arrival.mask()))
            else:  # remaining counts are used once more, then dropped
                tau = waited(state, parameter, None) if WAITED in state else None
                state.pop(WAITED, None)
            yield Received(local(parameter), grad, state, tau)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, or a state of AdamW, in which no element has waited."""
        super().load_state_dict(state_dict)  # casts all states to the parameter's dtype
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, own, strict=True):
            counts = state_dict["state"].get(index, {}).get(WAITED)
            if counts is not None:
                self.state[parameter][WAITED] = counts.to(parameter.device, torch.int16, copy=True)


def check_max_steps(optimizer: object, max_steps: object) -> None:
    """Raise ValueError unless max_steps is at least 1."""
    if not isinstance(max_steps, int | float) or not 1 <= max_steps <= math.inf:
        raise ValueError(f"max_steps of {type(optimizer).__name__} must be at least 1, got {max_steps}")


def waited(state: dict[str, Any], parameter: Tensor, came: Tensor | None) -> Tensor:
    """Count this step; return how many steps each element that ``came`` (None: all) waited, 0 for the others."""
    if WAITED not in state:
        state[WAITED] = torch.zeros_like(parameter, dtype=torch.int16)
    counts = local(state[WAITED])
    counts.clamp_(max=LONGEST - 1).add_(1)
    if came is None:
        return counts.float()
    ended = counts * came
    counts.sub_(ended)
    return ended.float()


def local(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, any other tensor unchanged; memory is shared."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill one block of memory, in any order."""
    place = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != place:
            return False
        place *= size
    return True


def in_memory(tensor: Tensor) -> Tensor:
    """Return a view (numel,) of a dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def in_shape_of(tensor: Tensor, vector: Tensor) -> Tensor:
    """Return ``vector`` (numel,), in the tensor's memory order, as a view with the tensor's shape."""
    return vector.as_strided(tensor.shape, tensor.stride()) if is_dense(tensor) else vector.view(tensor.shape)


def _by_dtype(received: list[Received]) -> Iterator[list[Received]]:
    """Yield lists of parameters with equal dtype and device, for foreach operations."""
    kinds: dict[object, list[Received]] = {}
    for each in received:
        kinds.setdefault((each.parameter.dtype, each.parameter.device), []).append(each)
    yield from kinds.values()
