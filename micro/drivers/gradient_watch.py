"""Notes, once each, where a loop loses a part of an update between a backward and the step of the optimizer.

An update holds residuals of many steps, and what it holds has left them: what is cut off from it is lost. Of gradients
that are removed the update is lost too, while what was not sent of them waits and is added to later steps.
"""

import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from micro.drivers.optimizer_steps import StepListener
from micro.names import listed

NUM_LOOKS = 20  # steps in which norms are compared, where gradients are written to after backward
SMALLER = 0.999  # a norm that is as much smaller has not only been rounded
DISCARDED = (
    "the gradients of a backward were removed without an optimizer step, but what was not sent of them waits in the "
    "residuals and is added to later steps: run such a backward within model.no_sync() or attachment.paused()"
)
REMOVED = (
    "gradients of {} were removed after backward: what was not sent of them piles up, and is applied at once later: "
    "reduce these parameters by dense= of micro.attach, or freeze them meanwhile"
)
SCALED = (
    "gradients were scaled to {:.2g} of what was reduced, as clip_grad_norm_ and unscale_ do: what is cut off from a "
    "sparse update is lost. Use clip= of micro.attach instead, and give it the scaler"
)


class GradientWatch(StepListener):
    """Follows the gradients of reduced backwards.

    *Discarded* gradients: between two backwards there was neither a step of an optimizer that holds any of the
    parameters nor a write to one, and the second finds a gradient gone that the first had left. Where it is still
    there, gradients are accumulated. Nothing is said before a step was seen once: a loop that writes to
    ``parameter.data`` by itself does neither.

    *Removed* and *scaled* ones are found before an optimizer's step, where its gradients are not those that backward
    left. Norms are taken only after a step whose gradients were written to, in at most NUM_LOOKS steps.

    Args:
        parameters: the model's by name, as far as they are reduced. Of sharded ones this rank's shards are looked at;
            autograd does not know a shard, so that the driver calls ``look``.
        compares: returns whether to look for removed and scaled gradients; called after the first backward.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, compares: Callable[[], bool]) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters: list[Any] = list(parameters.values())
        self._sharded = [parameter for parameter in self._parameters if hasattr(parameter, "to_local")]
        self._wants_comparison, self._compares = compares, False
        self._noted: set[str] = set()
        self._watched: Tensor | None = None  # stands for all, where one is enough
        self._has_value = False  # its gradient, at the end of the last backward
        self._version: int | None = None  # of the parameters, while a backward waits for its step
        self._has_stepped = self._is_discarded = False
        self._left: list[Any] = []  # parameters with a gradient at the end of the last backward
        self._grad_version, self._norm = 0, 0.0
        self._was_written = False
        self._looks_left = NUM_LOOKS

    def end_backward(self, *, is_applied: bool) -> None:
        """Note what a reduced backward has left; say so if the one before was thrown away.

        Args:
            is_applied: whether its gradients are for a step; not so where they are zero because one was not finite.
        """
        if self._is_discarded:
            self._note(DISCARDED)
        if self._watched is None:
            self._start()  # not before the first backward: a parameter without hooks lets DDP's buckets be restored
        if self._watched is not None:
            gradient = _own(self._watched.grad)
            self._has_value = gradient is not None and not gradient.is_cuda and bool(gradient.any())
        self._version = self._version_now() if is_applied else None
        if self._compares:
            self._left = [p for p in self._parameters if p.grad is not None] if is_applied else []
            self._grad_version = sum([p.grad._version for p in self._left])
            self._norm = _norm_of(self._left) if self._was_written and self._looks_left else 0.0

    def look(self) -> None:
        """Look at the watched parameter before its gradient of this backward is added to what is there."""
        if self._version is None or self._watched is None or DISCARDED in self._noted:
            return
        if self._version_now() != self._version:
            self._has_stepped, self._version = True, None
        elif self._has_stepped:
            gradient = _own(self._watched.grad)
            self._is_discarded = gradient is None or (self._has_value and not gradient.any())  # or set to zero

    def before_step(self, optimizer: Optimizer) -> None:
        """Compare the gradients that ``optimizer`` is about to use, unless there was a step since the backward."""
        if not self._left:
            return
        left = set(map(id, self._left))
        held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in left]
        present = [p for p in held if p.grad is not None]
        if not present:
            return
        if len(present) < len(held):
            self._note(REMOVED, listed([self._names[id(p)] for p in held if p.grad is None]))
        if len(present) == len(left):
            self._compare(present)
        self._left = []

    def after_step(self, optimizer: Optimizer) -> None:
        """Note a step of an optimizer that holds any of the parameters."""
        if any(id(parameter) in self._names for group in optimizer.param_groups for parameter in group["params"]):
            self._has_stepped, self._version = True, None

    def _version_now(self) -> int:
        """Return a number that each write in place raises: a DTensor counts its own, and those to its shard apart."""
        versions: list[int] = [p._version for p in [*self._parameters, *(p.to_local() for p in self._sharded)]]
        return sum(versions)

    def _compare(self, present: Sequence[Any]) -> None:
        if not self._norm:
            self._was_written |= sum([p.grad._version for p in present]) != self._grad_version
            return
        self._looks_left -= 1
        share = _norm_of(present) / self._norm
        if share < SMALLER:
            self._looks_left = 0
            self._note(SCALED, share)

    def _note(self, words: str, *details: object) -> None:
        if words not in self._noted:
            self._noted.add(words)
            warnings.warn(words.format(*details), stacklevel=3)

    def _start(self) -> None:
        """Watch from now on, unless all parameters are frozen for now."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if not trained:
            return
        self._watched = min(trained, key=lambda parameter: parameter.numel() or sys.maxsize)  # one with elements
        self._compares = self._wants_comparison()
        look = weakref.WeakMethod(self.look)  # neither the parameter nor torch must keep this alive
        handle = self._watched.register_hook(lambda _: watching() if (watching := look()) else None)
        self._stop = weakref.finalize(self, handle.remove)
        self.listen()

    def close(self) -> None:
        """Stop watching."""
        self.stop_listening()
        if self._watched is not None:
            self._stop()


def _own(tensor: Any) -> Tensor | None:
    """Return what this rank holds of a tensor: all of it, or its shard of a DTensor."""
    shard: Tensor | None = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def _norm_of(parameters: Sequence[Any]) -> float:
    norms = [torch.linalg.vector_norm(p.grad if p.grad.is_complex() else p.grad.float()) for p in parameters]
    return float(torch.stack(norms).norm()) if norms else 0.0  # host sync: in few steps
