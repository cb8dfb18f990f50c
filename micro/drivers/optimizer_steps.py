"""Objects that are told of every step of any torch.optim.Optimizer, as long as they live.

torch walks over its hooks without a copy. One that is removed in the middle of a step, which a garbage collection may
do, ends that step with an error; so the hooks here stay until Python ends.
"""

import weakref
from functools import cache
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class HearsBefore(Protocol):
    """What is told before a step."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at what ``optimizer`` is about to use."""


class HearsAfter(Protocol):
    """What is told after a step."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` has made a step."""


def tell_before(listener: HearsBefore) -> None:
    """Tell ``listener`` before each step from now on."""
    _register()
    _before.add(listener)


def tell_after(listener: HearsAfter) -> None:
    """Tell ``listener`` after each step from now on."""
    _register()
    _after.add(listener)


def tell_no_more(listener: Any) -> None:
    """Tell ``listener`` of no further step."""
    _before.discard(listener)
    _after.discard(listener)


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_tell_before)
    register_optimizer_step_post_hook(_tell_after)


def _tell_before(optimizer: Optimizer, *_: object) -> None:
    for each in list(_before):
        each.before_step(optimizer)


def _tell_after(optimizer: Optimizer, *_: object) -> None:
    for each in list(_after):
        each.after_step(optimizer)


_before: "weakref.WeakSet[HearsBefore]" = weakref.WeakSet()
_after: "weakref.WeakSet[HearsAfter]" = weakref.WeakSet()
