"""What a selector is: WHICH indices a rank contributes to a step."""

import dataclasses
import importlib
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from micro.comm import Comm
from micro.sparse import Overlap, Selection


@dataclass(frozen=True, slots=True)
class Step:
    """What a selector may know of the step: the same on every rank.

    Attributes:
        index: number of the step, from 0.
        target_count: k, the number of indices wanted over all ranks together (each rank alone, for local selectors).
        seed: the run's seed, for shared randomness.
    """

    index: int
    target_count: int
    seed: int


@dataclass(slots=True)
class NoState:
    """The state of a selector that remembers nothing."""


S = TypeVar("S")


class Selector(ABC, Generic[S]):
    """Parameters of a way to choose indices: a frozen dataclass. What changes from step to step is in its state.

    A subclass sets ``name`` (its word in yaml) and ``overlap``, and is found by that name as soon as its file lies in
    this folder.
    """

    name: ClassVar[str]
    overlap: ClassVar[Overlap] = Overlap.ANY

    @property
    def rule_name(self) -> str | None:
        """Which of several published behaviours this is, or None where there is only one."""
        return getattr(self, "rule", None)

    def start(self) -> S:
        """Return the state before the first step."""
        return NoState()  # type: ignore[return-value]

    @abstractmethod
    def select(self, state: S, acc: Tensor, step: Step, comm: Comm) -> Selection:
        """Return what this rank contributes.

        Args:
            state: this selector's own state; may be changed.
            acc: (numel,) gradient + residual. Not modified. Finite.
            step: the same on all ranks.
            comm: every rank calls the same collectives in the same order.
        """

    def save(self, state: S) -> dict[str, Any]:
        """Return the state as a plain dictionary."""
        return dataclasses.asdict(state)  # type: ignore[call-overload]

    def load(self, saved: dict[str, Any]) -> S:
        """Return the state that ``save`` described."""
        return type(self.start())(**saved)


def all_selectors() -> dict[str, type[Selector[Any]]]:
    """Return every selector class of this folder by name."""
    package = importlib.import_module("micro.selectors")
    found: dict[str, type[Selector[Any]]] = {}
    for entry in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"micro.selectors.{entry.name}")
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, Selector) and "name" in vars(cls):
                found[cls.name] = cls
    return dict(sorted(found.items()))


def build_selector(name: str, **settings: Any) -> Selector[Any]:
    """Return the selector called ``name`` with these settings.

    Raises:
        ValueError: no such selector, or a setting that it does not have.
    """
    known = all_selectors()
    if name not in known:
        raise ValueError(f"selector must be one of {', '.join(known)}, got '{name}'{_hint(name, list(known))}")
    allowed = [field.name for field in dataclasses.fields(known[name])]  # type: ignore[arg-type]
    for key in settings:
        if key not in allowed:
            has = ", ".join(allowed) or "no settings"
            raise ValueError(f"selector {name} has {has}, got '{key}'{_hint(key, allowed)}")
    return known[name](**settings)


def _hint(given: str, allowed: list[str]) -> str:
    close = get_close_matches(given, allowed, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
