"""A note where gradients are removed without an optimizer step, while what was not sent of them waits in residuals."""

import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from micro.drivers.optimizer_steps import call_after_steps, stop_calling

NOTE = (
    "the gradients of a backward were removed without an optimizer step, but what was not sent of them waits in the "
    "residuals and is added to later steps: run such a backward within model.no_sync() or attachment.paused()"
)


class DiscardedGradients:
    """Compares the parameters of two reduced backwards, and warns once where gradients were removed between them.

    A step is one of a torch.optim.Optimizer that holds any of the parameters, or a write to any of them, which raises
    its version counter. Where there was none between two backwards, and the gradient of a parameter is gone when the
    second one computes it, the first one's gradients were thrown away. They were accumulated where the gradient is
    still there, which is as good as a step. A loop that writes to ``parameter.data`` by itself does neither: nothing is
    said before a step was seen once.

    Args:
        parameters: the model's, as far as they are reduced. Of one that is sharded, this rank's shard is looked at;
            autograd does not know the shard, so that its driver calls ``look``.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._watched = parameters[0]
        self._has_shards = any(hasattr(parameter, "to_local") for parameter in parameters)
        self._ids = {id(parameter) for parameter in parameters}
        self._versions: int | None = None
        self._had_gradient = False
        self._has_stepped = False
        self._is_found = False
        self._has_warned = False
        self._stop: Callable[[], object] | None = None

    def end_backward(self, *, is_applied: bool) -> None:
        """Note the parameters at the end of a reduced backward, and warn if the one before was thrown away.

        Args:
            is_applied: whether its gradients are for a step; not so where they are zero because one was not finite.
        """
        if self._is_found and not self._has_warned:
            self._has_warned = True
            warnings.warn(NOTE, stacklevel=2)
        self._versions = self._version() if is_applied else None
        if self._stop is None:
            self._start()  # not before the first backward: a parameter without hooks lets DDP's buckets be restored
        gradient = self._gradient()
        self._had_gradient = gradient is not None and not gradient.is_cuda and bool(gradient.any())

    def close(self) -> None:
        """Stop watching."""
        if self._stop is not None:
            stop_calling(self)
            self._stop()

    def _start(self) -> None:
        """Look at every backward and at every step from now on, unless all parameters are frozen for now."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if not trained:
            return
        self._watched = min(trained, key=lambda parameter: parameter.numel() or sys.maxsize)  # one with elements
        me = weakref.ref(self)  # neither the parameter nor torch must keep this alive

        def look(_: Tensor) -> None:
            if (watching := me()) is not None:
                watching.look()

        self._stop = weakref.finalize(self, self._watched.register_hook(look).remove)
        call_after_steps(self)

    def after_step(self, optimizer: Optimizer) -> None:
        """Note a step of an optimizer that holds any of the parameters."""
        if any(id(parameter) in self._ids for group in optimizer.param_groups for parameter in group["params"]):
            self._has_stepped, self._versions = True, None

    def _version(self) -> int:
        if self._has_shards:
            return sum(map(_version, self._parameters))
        return sum([parameter._version for parameter in self._parameters])  # twice a step

    def look(self) -> None:
        """Look at the watched parameter before its gradient of this backward is added to what is there."""
        if self._versions is None or self._has_warned:
            return
        if self._version() != self._versions:
            self._has_stepped, self._versions = True, None
        elif self._has_stepped and self._is_removed():
            self._is_found = True

    def _gradient(self) -> Tensor | None:
        gradient = self._watched.grad
        return None if gradient is None else _own(gradient)

    def _is_removed(self) -> bool:
        gradient = self._gradient()
        if gradient is None:
            return True
        return self._had_gradient and not gradient.any()  # zeroed in place; on a GPU that would make the host wait


def _own(tensor: Any) -> Tensor:
    """Return what this rank holds of a tensor: all of it, or its shard of a DTensor."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def _version(tensor: Tensor) -> int:
    """Return a number that each write in place raises: a DTensor counts its own, and those to its shard apart."""
    shard = _own(tensor)
    return tensor._version if shard is tensor else tensor._version + shard._version
