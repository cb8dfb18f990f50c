"""A selector around another: what all such share."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from micro.parts import as_part
from micro.selectors.base import Selector, Traits
from micro.values.sparse import Overlap

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappingSelector(Selector[S]):
    """A selector that leaves the choice to another one. It is no method itself: subclasses have names.

    Subclasses set ``own_traits``, and ``kept_traits``: those that it has where the selector inside has them.

    Args:
        selector: the other one: a part, its name, or a mapping.

    Raises:
        ValueError: a selector that ``why_not`` says does not go with this one.
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
        """Return why this makes no sense around a selector, or None where it does."""

    @property
    def overlap(self) -> Overlap:  # type: ignore[override]  # depends on the selector
        """How the index sets of different ranks relate: as the selector's do."""
        return self.selector.overlap

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # depends on the selector
        """Its own traits, and those of the selector that it keeps."""
        return self.own_traits | (self.selector.traits & self.kept_traits)

    @property
    def rule_name(self) -> str | None:
        """Which published behaviour the selector follows."""
        return self.selector.rule_name

    @property
    def full_name(self) -> str:
        """The name, and the selector's."""
        return f"{self.name} {self.selector.full_name}"
