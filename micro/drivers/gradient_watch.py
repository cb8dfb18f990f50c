"""Warn once if a loop loses part of an update between backward and the optimizer's step, for instance by clipping.

An update contains residuals of many steps, which no longer have them: anything clipped from it is lost. If gradients
are discarded, the update is lost too, but their unsent part stays in the residual and is sent later.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from micro.drivers.optimizer_steps import StepListener
from micro.values.names import listed
from micro.warn import warn

NUM_LOOKS = 20  # all gradients are checked in so many first backwards; norms are compared in at most so many steps
PERIOD = 64  # afterwards they are checked in one backward of so many
SMALLER = 0.999  # a norm below this share was scaled, not rounded
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
    "sparse update is lost. Use clip= of micro.attach instead, accumulate inside no_sync(), and give attach the scaler"
)
ACCUMULATED = (
    "a backward began while the averaged gradients of the last one were still there, so they are averaged once more: "
    "run all but the last backward of a step inside no_sync() (FSDP: set_requires_gradient_sync(False))"
)
OWN = (
    "gradients of {} are this rank's own, nothing averaged them: run the last backward of each step on an output of "
    "the wrapped model, outside of no_sync() and paused(), or remove these gradients by zero_grad() before the step"
)
ADDED = (
    "gradients of {} were added to after they were averaged, and what was added is this rank's own, so that ranks "
    "differ from now on: add all losses of a step, and call backward once"
)


class TouchedGradients:
    """Follows the gradients of some parameters from one reduced backward to the next.

    Attributes:
        is_accumulated: whether the latest backward began with gradients that a reduced one had left.
        touched: gradients that a backward wrote since the last reduced one, by the id of the parameter. True means
            *new*: there was none before, or a step had used the old one.
    """

    def __init__(self) -> None:
        self.is_accumulated = self._is_sharded = False
        self.touched: dict[int, bool] = {}
        self._parameters: dict[int, Any] = {}
        self._reduced: dict[int, tuple[int, int]] = {}  # versions of gradient and parameter at the last settle
        self._graph: int | None = None
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles)  # the hooks must not keep this alive

    def follow(self, parameters: Iterable[Any]) -> None:
        """Follow only these parameters from now on; do not call it during a backward.

        Autograd has no hook for the gradient of a shard; its driver calls ``touch``.
        """
        _remove(self._handles)
        self._parameters = {id(each): each for each in parameters if each.requires_grad}
        self._is_sharded = any(hasattr(each, "to_local") for each in self._parameters.values())
        touch = partial(TouchedGradients.touch, weakref.proxy(self))  # the hooks must not keep this alive
        for number, parameter in self._parameters.items():
            if not hasattr(parameter, "to_local"):
                self._handles.append(parameter.register_hook(partial(touch, number)))

    def settle(self) -> None:
        """Note that all gradients are now as the buckets wrote them."""
        self.touched.clear()
        self.is_accumulated = False
        if self._is_sharded:
            self._reduced = {number: _versions(parameter) for number, parameter in self._parameters.items()}
            return
        self._reduced = {
            number: (-1 if each.grad is None else each.grad._version, each._version)
            for number, each in self._parameters.items()
        }

    def touch(self, number: int, _: object = None) -> None:
        """Note that a backward is about to add to the gradient of the parameter with this id."""
        graph = torch._C._current_graph_task_id()
        if graph != self._graph:
            self._graph, self.is_accumulated = graph, self._finds_reduced(number)
        if number not in self.touched:
            parameter = self._parameters[number]
            version = version_of(parameter) if self._is_sharded else parameter._version
            is_used = number in self._reduced and self._reduced[number][1] != version
            self.touched[number] = parameter.grad is None or is_used

    def added_to(self, parameter: Any) -> bool:
        """Return whether a backward added to a reduced gradient before a step used it."""
        number = id(parameter)
        return self.touched.get(number) is False and _versions(parameter)[0] != self._reduced[number][0]

    def close(self) -> None:
        """Stop following."""
        _remove(self._handles)

    def _finds_reduced(self, number: int) -> bool:
        """Return whether this backward begins with reduced gradients that no step used.

        Gradients that were written to may be zero. On a GPU reading them would make the host wait, so they are then
        assumed to be zero.
        """
        if number not in self._reduced or self.touched.get(number) or self._parameters[number].grad is None:
            return False
        before, now = self._reduced[number], _versions(self._parameters[number])
        gradient = own(self._parameters[number].grad)
        if gradient is None or before[1] != now[1]:
            return False
        if before[0] != now[0] and gradient.is_cuda:
            return self.is_accumulated
        left = [own(parameter.grad) for parameter in self._parameters.values()]
        return any(bool(each.any()) for each in left if each is not None)  # host sync: where gradients are accumulated


class GradientWatch(StepListener):
    """Follows the gradients of reduced backwards.

    Found at a backward:
    - *discarded*: the gradients of the last backward are gone, and no step used them. Warns only after a step was seen,
      because a loop that writes to ``parameter.data`` itself makes none;
    - *accumulated*: they are still there.

    Found before an optimizer's step (after it, if its closure runs the backward):
    - *removed* and *scaled*: they are not those that backward left. Norms are compared only after a step whose
      gradients were written to, in at most NUM_LOOKS steps;
    - *own*: no bucket wrote them; *added to*: a later backward added to them.

    In the first NUM_LOOKS backwards, and in one of PERIOD afterwards, all parameters are checked, otherwise one.

    Args:
        parameters: the reduced parameters by name. Of sharded ones this rank's shards are checked; autograd has no hook
            for a shard, so the driver calls ``look_at_shards``.
        compares: returns whether to look for removed and scaled gradients; called after the first backward.
        accumulates: returns None if accumulated gradients do no harm, '' to warn, or the setting that loses a part of
            them, which is an error.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        compares: Callable[[], bool],
        accumulates: Callable[[], str | None] = lambda: "",
    ) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters: list[Any] = list(parameters.values())
        self._wants_comparison, self._compares = compares, False
        self._accumulates = accumulates
        self._noted: set[str] = set()
        self._watched: Any = None  # the parameter that is checked when one is enough
        self._has_value = False  # whether its gradient was not zero at the end of the last backward
        self._version: int | None = None  # its version while a backward waits for its step
        self._has_stepped = self._is_discarded = self._is_accumulated = False
        self._touched, self._num_reduced = TouchedGradients(), 0
        self._is_close = False
        self._left: list[Any] = []  # parameters with a gradient at the end of the last backward
        self._grad_version, self._norm = 0, 0.0
        self._was_written = False
        self._looks_left = NUM_LOOKS
        self.listen()

    def settle(self) -> None:
        """Note the end of a backward with averaged gradients, or zeros on all ranks."""
        if self._watched is None:
            self._start()  # after the first backward: DDP's buckets can only be restored without hooks
        self._is_accumulated = self._touched.is_accumulated
        self._num_reduced += 1
        is_close = self._num_reduced < NUM_LOOKS or self._num_reduced % PERIOD == 0
        if self._watched is not None and is_close != self._is_close:
            self._touched.follow(self._parameters if is_close else [self._watched])
            self._is_close = is_close
        self._touched.settle()

    def end_backward(self, *, is_applied: bool) -> None:
        """Record the gradients of a reduced backward; warn if the last ones were discarded or accumulated.

        Args:
            is_applied: whether its gradients are for a step; False if they are zero because one was not finite.

        Raises:
            ValueError: gradients were accumulated, and these settings lose a part of them.
        """
        if self._is_accumulated:
            self._note_accumulated()
        if self._is_discarded:
            self._note(DISCARDED)
        if self._watched is not None:
            gradient = own(self._watched.grad)
            self._has_value = gradient is not None and not gradient.is_cuda and bool(gradient.any())
            self._version = version_of(self._watched) if is_applied else None
        self._left = []
        if self._compares and self._is_close and is_applied:
            self._left = [p for p in self._parameters if p.grad is not None]
            self._grad_version = sum([p.grad._version for p in self._left])
            self._norm = _norm_of(self._left) if self._was_written and self._looks_left else 0.0

    def look(self, _: object = None) -> None:
        """Check the watched parameter before this backward adds to its gradient."""
        if self._version is None or self._watched is None or DISCARDED in self._noted:
            return
        if version_of(self._watched) != self._version:
            self._has_stepped, self._version = True, None
        elif self._has_stepped:
            gradient = own(self._watched.grad)
            self._is_discarded = gradient is None or (self._has_value and not gradient.any())  # or set to zero

    def look_at_shards(self) -> None:
        """Call the hooks for sharded parameters, when a backward reaches the first of them."""
        if self._watched is not None:
            self._touched.touch(id(self._watched))
            self.look()

    def before_step(self, optimizer: Optimizer) -> None:
        """Compare the gradients that ``optimizer`` will use with those of the last backward, before its first step."""
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

    def check_gradients(self, optimizer: Optimizer) -> None:
        """Refuse gradients that no bucket wrote; warn about those that a later backward added to.

        Raises:
            ValueError: ``optimizer`` would use a gradient of this rank alone.
        """
        touched = self._touched.touched
        if self._num_reduced and not touched:
            return
        moved = [
            group for group in optimizer.param_groups if group.get("lr") != 0
        ]  # without: a step that only measures time
        held = [p for group in moved for p in group["params"] if id(p) in self._names]
        present = [p for p in held if p.grad is not None]
        new = [p for p in present if not self._num_reduced or touched.get(id(p))]
        names = [self._names[id(p)] for p in new if _has_values(p)]
        if names:
            raise ValueError(OWN.format(listed(names)))
        added = [self._names[id(p)] for p in present if self._touched.added_to(p)]
        if added:
            self._note(ADDED, listed(added))

    def after_step(self, optimizer: Optimizer) -> None:
        """Note a step of an optimizer that holds any of the parameters."""
        if self._has_stepped and self._version is None:
            return
        if any(id(parameter) in self._names for group in optimizer.param_groups for parameter in group["params"]):
            self._has_stepped, self._version = True, None

    def _compare(self, present: Sequence[Any]) -> None:
        if not self._norm:
            self._was_written |= sum([p.grad._version for p in present]) != self._grad_version
            return
        self._looks_left -= 1
        share = _norm_of(present) / self._norm
        if share < SMALLER:
            self._looks_left = 0
            self._note(SCALED, share)

    def _note_accumulated(self) -> None:
        lossy = self._accumulates()
        if lossy:
            raise ValueError(f"{ACCUMULATED}. With {lossy} a part of them is lost")
        if lossy is not None:
            self._note(ACCUMULATED)

    def _note(self, words: str, *details: object) -> None:
        if words not in self._noted:
            self._noted.add(words)
            warn(words.format(*details))

    def _start(self) -> None:
        """Start to watch, unless all parameters are frozen."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if not trained:
            return
        self._watched = min(trained, key=lambda parameter: parameter.numel() or sys.maxsize)  # never an empty one
        self._compares = self._wants_comparison()
        look = partial(GradientWatch.look, weakref.proxy(self))  # the hook must not keep this alive
        handle = self._watched.register_hook(look)
        self._stop = weakref.finalize(self, handle.remove)

    def close(self) -> None:
        """Stop watching."""
        self.stop_listening()
        self._touched.close()
        if self._watched is not None:
            self._stop()


def own(tensor: Any) -> Tensor | None:
    """Return the tensor, or this rank's shard of a DTensor."""
    shard: Tensor | None = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def version_of(parameter: Any) -> int:
    """Return a number that every in-place write increases, also writes to a DTensor's shard."""
    version: int = parameter._version
    return version + (parameter.to_local()._version if hasattr(parameter, "to_local") else 0)


def _versions(parameter: Any) -> tuple[int, int]:
    gradient = own(parameter.grad)
    return -1 if gradient is None else gradient._version, version_of(parameter)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _has_values(parameter: Any) -> bool:
    gradient = own(parameter.grad)
    return gradient is not None and bool(gradient.any())  # host sync: where an error is likely


def _norm_of(parameters: Sequence[Any]) -> float:
    norms = [torch.linalg.vector_norm(p.grad if p.grad.is_complex() else p.grad.float()) for p in parameters]
    return float(torch.stack(norms).norm()) if norms else 0.0  # host sync: in few steps
