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

NUM_LOOKS = 20  # reduced backwards that are followed closely, and steps in which norms are compared
PERIOD = 64  # of the later ones, one of so many is
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
        is_accumulated: whether the backward that runs, or ran last, found gradients that a reduced one had left.
        touched: whether a gradient is *new*, by the id of its parameter, for each that a backward has touched since the
            last reduced one. It is new where there was none before, or where a step had used the one that was there.
    """

    def __init__(self) -> None:
        self.is_accumulated = self._is_sharded = False
        self.touched: dict[int, bool] = {}
        self._parameters: dict[int, Any] = {}
        self._reduced: dict[int, tuple[int, int]] = {}  # versions of gradient and parameter at the last settle
        self._graph: int | None = None
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles)  # neither a parameter nor torch must keep this alive

    def follow(self, parameters: Iterable[Any]) -> None:
        """Follow these parameters, and no others, from now on; not between the first and last gradient of a backward.

        A shard has no hook that runs where its gradient arrives: its driver calls ``touch``.
        """
        _remove(self._handles)
        self._parameters = {id(each): each for each in parameters if each.requires_grad}
        self._is_sharded = any(hasattr(each, "to_local") for each in self._parameters.values())
        touch = partial(TouchedGradients.touch, weakref.proxy(self))  # its hooks go with it
        for number, parameter in self._parameters.items():
            if not hasattr(parameter, "to_local"):
                self._handles.append(parameter.register_hook(partial(touch, number)))

    def settle(self) -> None:
        """Note that all gradients are those that buckets have written."""
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
        """Return whether a backward added to what a bucket had written, and no step had used yet."""
        number = id(parameter)
        return self.touched.get(number) is False and _versions(parameter)[0] != self._reduced[number][0]

    def close(self) -> None:
        """Follow nothing any more."""
        _remove(self._handles)

    def _finds_reduced(self, number: int) -> bool:
        """Return whether what a reduced backward left is still there as this one begins, and no step used it.

        A write has changed it, perhaps to zeros: on an accelerator, where to look means to wait, that is believed.
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

    *Discarded* gradients: between two backwards there was neither a step of an optimizer that holds any of the
    parameters nor a write to one, and the second finds a gradient gone that the first had left. Nothing is said before
    a step was seen once: a loop that writes to ``parameter.data`` by itself does neither. *Accumulated* ones are still
    there.

    *Removed* and *scaled* ones are found before an optimizer's step, where its gradients are not those that backward
    left. Norms are taken only after a step whose gradients were written to, in at most NUM_LOOKS steps.

    *Own* gradients, which no bucket has written, and those that were *added to* afterwards are found before the step
    too, or after it where its closure runs the backward.

    The first NUM_LOOKS backwards are followed closely, and one of PERIOD afterwards: a hook on each parameter, and all
    gradients looked at. In the others one parameter stands for all.

    Args:
        parameters: the model's by name, as far as they are reduced. Of sharded ones this rank's shards are looked at;
            autograd does not know a shard, so that the driver calls ``look``.
        compares: returns whether to look for removed and scaled gradients; called after the first backward.
        accumulates: returns None where accumulated gradients do no harm, '' where that is noted, or what loses a part
            of them, which is an error.
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
        self._watched: Any = None  # stands for all, where one is enough
        self._has_value = False  # its gradient, at the end of the last backward
        self._version: int | None = None  # of it, while a backward waits for its step
        self._has_stepped = self._is_discarded = self._is_accumulated = False
        self._touched, self._num_reduced = TouchedGradients(), 0
        self._is_close = False
        self._left: list[Any] = []  # parameters with a gradient at the end of the last backward
        self._grad_version, self._norm = 0, 0.0
        self._was_written = False
        self._looks_left = NUM_LOOKS
        self.listen()

    def settle(self) -> None:
        """Note that a backward has ended whose gradients are averaged, or zero on all ranks."""
        if self._watched is None:
            self._start()  # not before the first backward: a parameter without hooks lets DDP's buckets be restored
        self._is_accumulated = self._touched.is_accumulated
        self._num_reduced += 1
        is_close = self._num_reduced < NUM_LOOKS or self._num_reduced % PERIOD == 0
        if self._watched is not None and is_close != self._is_close:
            self._touched.follow(self._parameters if is_close else [self._watched])
            self._is_close = is_close
        self._touched.settle()

    def end_backward(self, *, is_applied: bool) -> None:
        """Note what a reduced backward has left; say so if the one before was thrown away, or is in it once more.

        Args:
            is_applied: whether its gradients are for a step; not so where they are zero because one was not finite.

        Raises:
            ValueError: it holds gradients of the one before, of which a part is lost with these settings.
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
        """Look at the watched parameter before its gradient of this backward is added to what is there."""
        if self._version is None or self._watched is None or DISCARDED in self._noted:
            return
        if version_of(self._watched) != self._version:
            self._has_stepped, self._version = True, None
        elif self._has_stepped:
            gradient = own(self._watched.grad)
            self._is_discarded = gradient is None or (self._has_value and not gradient.any())  # or set to zero

    def look_at_shards(self) -> None:
        """Do for sharded parameters what hooks do for others, as a backward reaches the first of them."""
        if self._watched is not None:
            self._touched.touch(id(self._watched))
            self.look()

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

    def check_gradients(self, optimizer: Optimizer) -> None:
        """Refuse gradients that no bucket has written, and note those that were added to afterwards.

        Raises:
            ValueError: ``optimizer`` would use a gradient of this rank alone.
        """
        touched = self._touched.touched
        if self._num_reduced and not touched:
            return
        moved = [group for group in optimizer.param_groups if group.get("lr") != 0]  # others are stepped for a timing
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
        """Watch from now on, unless all parameters are frozen for now."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if not trained:
            return
        self._watched = min(trained, key=lambda parameter: parameter.numel() or sys.maxsize)  # one with elements
        self._compares = self._wants_comparison()
        look = partial(GradientWatch.look, weakref.proxy(self))  # neither the parameter nor torch must keep this alive
        handle = self._watched.register_hook(look)
        self._stop = weakref.finalize(self, handle.remove)

    def close(self) -> None:
        """Stop watching."""
        self.stop_listening()
        self._touched.close()
        if self._watched is not None:
            self._stop()


def own(tensor: Any) -> Tensor | None:
    """Return what this rank holds of a tensor: all of it, or its shard of a DTensor."""
    shard: Tensor | None = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def version_of(parameter: Any) -> int:
    """Return a number that each write in place raises: a DTensor counts its own, and those to its shard apart."""
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
