"""The base class of selectors that wrap another selector."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from micro.parts import as_part
from micro.selectors.base import Selector, Traits
from micro.values.sparse import Overlap

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappingSelector(Selector[S]):
    """A selector that wraps another one, which makes the choice. Subclasses have names.

    Subclasses set ``own_traits``, and ``kept_traits``: those that they take over from the inner selector.

    Args:
        selector: the inner selector: a part, its name, or a mapping.

    Raises:
        ValueError: the inner selector is not supported, see ``why_not``.
    """

    selector: Selector[Any]
    own_traits: ClassVar[Traits]
    kept_traits: ClassVar[Traits] = Traits.OWN_DENSITY

    def __post_init__(self) -> None:
        object.__setattr__(self, "selector", as_part(Selector, self.selector))
        why = self.why_not(self.selector)
        if why:
            raise ValueError(f"selector {self.selector.full_name} {why}: use it without {self.name}")

    @staticmethod
    @abstractmethod
    def why_not(selector: Selector[Any]) -> str | None:
        """Return why a selector cannot be wrapped, or None if it can."""

    @property
    def overlap(self) -> Overlap:  # type: ignore[override]  # depends on the selector
        """How the ranks' index sets overlap: as the inner selector's."""
        return self.selector.overlap

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # depends on the selector
        """Its own traits, and those kept from the inner selector."""
        return self.own_traits | (self.selector.traits & self.kept_traits)

    @property
    def rule_name(self) -> str | None:
        """The rule of the inner selector."""
        return self.selector.rule_name

    @property
    def full_name(self) -> str:
        """The name, followed by the inner selector's."""
        return f"{self.name} {self.selector.full_name}"
