"""Objects whose methods are called at every step of any torch.optim.Optimizer, as long as they live.

torch walks over its hooks without a copy. One that is removed in the middle of a step, which a garbage collection may
do, ends that step with an error; so the hooks here stay until Python ends.
"""

import weakref
from functools import cache
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class BeforeStep(Protocol):
    """What is called before a step."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at what ``optimizer`` is about to use."""


class AfterStep(Protocol):
    """What is called after a step."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` has made a step."""


def call_before_steps(listener: BeforeStep) -> None:
    """Call ``listener.before_step`` before each step from now on."""
    _register()
    _before.add(listener)


def call_after_steps(listener: AfterStep) -> None:
    """Call ``listener.after_step`` after each step from now on."""
    _register()
    _after.add(listener)


def stop_calling(listener: Any) -> None:
    """Call ``listener`` at no further step."""
    _before.discard(listener)
    _after.discard(listener)


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    for each in list(_before):
        each.before_step(optimizer)


def _after_step(optimizer: Optimizer, *_: object) -> None:
    for each in list(_after):
        each.after_step(optimizer)


_before: "weakref.WeakSet[BeforeStep]" = weakref.WeakSet()
_after: "weakref.WeakSet[AfterStep]" = weakref.WeakSet()
