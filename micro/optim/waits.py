"""How long each element waited for what came now: what optimizers for sparse updates have in common."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from micro.drivers.arrivals import arrival_of

LONGEST = torch.iinfo(torch.int16).max  # steps that are counted; a longer wait counts as this
FEW = 8  # elements for each that came, from which on a CPU computes with those alone
WAITED = "waited"


@dataclass(frozen=True, slots=True)
class Received:
    """What came for one parameter.

    Attributes:
        parameter, grad: this rank's shard where they are sharded.
        state: of the optimizer for this parameter.
        tau: steps that each element waited for what came now, 0 where nothing came, of the parameter's shape in single
            precision; None where a gradient came for every element, and none had waited.
    """

    parameter: Tensor
    grad: Tensor
    state: dict[str, Any]
    tau: Tensor | None

    def part(self, names: Iterable[str]) -> tuple[list[Tensor], Callable[[list[Tensor]], None] | None]:
        """Return what to compute with: parameter, gradient, tau, and the states of these names; and how to put it back.

        On a CPU these are copies of the few elements that came, which the second then writes back. Otherwise they are
        all elements, which need not be put back: there it is None.
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
    """Counts for each element how many steps it waited for what came now.

    What came is known of the attachment that reduced the gradient; where there is none, an element came if its
    gradient is not zero. The counts, two bytes an element, are there as long as any element waits.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update each parameter that has a gradient; return what ``closure`` returns.

        Raises:
            ValueError: a gradient is sparse (torch.sparse) or complex, or the attachment sends something else than sums
                of gradients.
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
        """Return the state of a parameter before its first step; here there is none."""
        return {}

    def _counts(self, group: dict[str, Any]) -> bool:
        """Return whether waits matter to the parameters of a group."""
        return True

    def _update_whole_(self, received: list[Received], group: dict[str, Any]) -> None:
        """Update parameters whose every element came, and none had waited."""
        raise NotImplementedError

    def _update_(self, received: Iterable[list[Received]], group: dict[str, Any]) -> None:
        """Update parameters of which some elements came, or some had waited; in lists of one dtype and device."""
        raise NotImplementedError

    def _received(self, group: dict[str, Any]) -> Iterator[Received]:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state, grad = self.state[parameter], local(parameter.grad)
            if not self._counts(group):
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
            else:  # counts that are left over are used once more, and then not needed
                tau = waited(state, parameter, None) if WAITED in state else None
                state.pop(WAITED, None)
            yield Received(local(parameter), grad, state, tau)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, or a state of AdamW: then no element has waited yet."""
        super().load_state_dict(state_dict)  # which makes all states of the parameter's dtype
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
    """Count this step; return for how many steps each element waited that ``came`` (None: all), 0 for the others."""
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
    """Return this rank's shard of a DTensor, any other tensor as it is; memory is shared."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill one piece of memory, in whatever order."""
    place = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != place:
            return False
        place *= size
    return True


def in_memory(tensor: Tensor) -> Tensor:
    """Return a dense tensor as a vector (numel,), in the order of its memory, which is shared."""
    return tensor.as_strided((tensor.numel(),), (1,))


def in_shape_of(tensor: Tensor, vector: Tensor) -> Tensor:
    """Return ``vector`` (numel,), whose order is that of the tensor's memory, in the tensor's shape."""
    return vector.as_strided(tensor.shape, tensor.stride()) if is_dense(tensor) else vector.view(tensor.shape)


def _by_dtype(received: list[Received]) -> Iterator[list[Received]]:
    """Yield lists of parameters of one dtype and device, which can be computed together."""
    kinds: dict[object, list[Received]] = {}
    for each in received:
        kinds.setdefault((each.parameter.dtype, each.parameter.device), []).append(each)
    yield from kinds.values()
