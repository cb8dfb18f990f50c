"""Call listeners at every step of any torch.optim.Optimizer, as long as they exist.

torch iterates over its hooks without a copy. Removing one during a step, as garbage collection may do, raises an error
in that step; so the hooks here stay until Python exits.
"""

import sys
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Hook = Callable[..., None]
_RUNNER = Optimizer.profile_hook_step(lambda _: None).__code__  # of the function around ``step`` that runs its hooks


def outermost(hook: Hook) -> Hook:
    """Return a step hook that is called once a step, also where a subclass's ``step`` calls ``super().step()``.

    torch runs the hooks of both.
    """

    def call(optimizer: Optimizer, *rest: object) -> None:
        if not _is_inner(optimizer):
            hook(optimizer, *rest)

    return call


def _is_inner(optimizer: Optimizer) -> bool:
    """Return whether the hook that calls this is run by a step within another one of ``optimizer``."""
    frame, found = sys._getframe(2), 0
    while frame is not None:
        found += frame.f_code is _RUNNER and frame.f_locals.get("self") is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return found > 1


class StepListener:
    """Is called before and after steps from ``listen`` on, until ``stop_listening``."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at what ``optimizer`` is about to use; here nothing is done."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` has made a step; here nothing is done."""

    def check_gradients(self, optimizer: Optimizer) -> None:
        """Refuse the gradients of a step: before it, or after one whose closure made them; here nothing is done."""

    def listen(self) -> None:
        """Be called at each step from now on."""
        _register()
        _listeners.add(self)

    def stop_listening(self) -> None:
        """Be called at no further step."""
        _listeners.discard(self)


_listeners: "weakref.WeakSet[StepListener]" = weakref.WeakSet()


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    listeners = list(_listeners)
    for each in listeners:
        each.before_step(optimizer)
    if not _has_closure(args, kwargs):
        _check(listeners, optimizer)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    listeners = list(_listeners)
    for each in listeners:
        each.after_step(optimizer)
    if _has_closure(args, kwargs):
        _check(listeners, optimizer)


def _has_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return any(map(callable, (*args, *kwargs.values())))  # an optimizer, the first of args, is not callable


def _check(listeners: list[StepListener], optimizer: Optimizer) -> None:
    for each in listeners:
        each.check_gradients(optimizer)
