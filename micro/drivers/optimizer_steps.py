"""Call listeners at every step of any torch.optim.Optimizer.

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
_RUNNER = Optimizer.profile_hook_step(lambda _: None).__code__  # the wrapper of ``step`` that runs hooks


def outermost(hook: Hook) -> Hook:
    """Return a step hook that is called once per step, even if a subclass's ``step`` calls ``super().step()``.

    torch runs the hooks of both.
    """

    def call(optimizer: Optimizer, *rest: object) -> None:
        if not _is_inner(optimizer):
            hook(optimizer, *rest)

    return call


def _is_inner(optimizer: Optimizer) -> bool:
    """Return whether the calling hook belongs to a step inside another step of ``optimizer``."""
    frame, found = sys._getframe(2), 0
    while frame is not None:
        found += frame.f_code is _RUNNER and frame.f_locals.get("self") is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return found > 1


class StepListener:
    """Is called before and after each step, between ``listen`` and ``stop_listening``."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before a step of ``optimizer``; does nothing here."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after a step of ``optimizer``; does nothing here."""

    def check_gradients(self, optimizer: Optimizer) -> None:
        """Called when a step's gradients are known: before it, or after it with a closure; does nothing here."""

    def listen(self) -> None:
        """Start to be called."""
        _register()
        _listeners.add(self)

    def stop_listening(self) -> None:
        """Stop being called."""
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
    return any(map(callable, (*args, *kwargs.values())))  # args begins with the optimizer, which is not callable


def _check(listeners: list[StepListener], optimizer: Optimizer) -> None:
    for each in listeners:
        each.check_gradients(optimizer)
