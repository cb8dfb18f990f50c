"""Which gradients a backward has made or added to since the last one that was reduced, seen by hooks on parameters."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class TouchedGradients:
    """Follows the gradients of some parameters from one reduced backward to the next.

    Attributes:
        is_accumulated: whether the backward that runs, or ran last, found gradients that a reduced one had left.
        touched: whether a gradient is *new*, by the id of its parameter, for each that a backward has touched since the
            last reduced one. It is new where there was none before, or where a step had used the one that was there.
    """

    def __init__(self) -> None:
        self.is_accumulated = False
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
        touch = weakref.WeakMethod(self.touch)
        for number, parameter in self._parameters.items():
            if not hasattr(parameter, "to_local"):
                self._handles.append(parameter.register_hook(partial(_call, touch, number)))

    def settle(self) -> None:
        """Note that all gradients are those that buckets have written."""
        self.touched.clear()
        self.is_accumulated = False
        self._reduced = {number: _versions(parameter) for number, parameter in self._parameters.items()}

    def touch(self, number: int) -> None:
        """Note that a backward is about to add to the gradient of the parameter with this id."""
        graph = torch._C._current_graph_task_id()
        if graph != self._graph:
            self._graph, self.is_accumulated = graph, self._finds_reduced(number)
        if number not in self.touched:
            parameter = self._parameters[number]
            is_used = number in self._reduced and self._reduced[number][1] != version_of(parameter)
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
        if number not in self._reduced or self.touched.get(number):
            return False
        before, now = self._reduced[number], _versions(self._parameters[number])
        gradient = own(self._parameters[number].grad)
        if gradient is None or before[1] != now[1]:
            return False
        if before[0] != now[0] and gradient.is_cuda:
            return self.is_accumulated
        left = [own(parameter.grad) for parameter in self._parameters.values()]
        return any(bool(each.any()) for each in left if each is not None)  # host sync: where gradients are accumulated


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


def _call(touch: "weakref.WeakMethod[Any]", number: int, _: Tensor) -> None:
    if (touching := touch()) is not None:
        touching(number)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
