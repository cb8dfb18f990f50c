"""Parts by name: each choice is a class in a file of its own, found by the word that a yaml uses for it.

Another package adds parts by entry points. Its pyproject.toml has, for a selector:

    [project.entry-points."micro.selectors"]
    smallest = "its_module:Smallest"

where ``Smallest`` is a frozen dataclass derived from ``micro.Selector`` with ``name = "smallest"``. The groups, and
what their parts derive from:

    micro.selectors      micro.Selector         micro.feedback     micro.Feedback
    micro.exchanges      micro.Exchange         micro.densities    micro.Density
    micro.codecs         micro.Codec            micro.reducers     micro.Reducer
    micro.index_codecs   micro.IndexCodec       micro.schedules    micro.planning.schedules.base.Schedule
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from types import ModuleType
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args, get_type_hints

from micro.entry_points import check_no_collision, installed_parts, load_part
from micro.flat import Layout
from micro.scalars import check_scalar

Rule = Literal["repaired", "published"]
"""Where the public code of a paper has a defect that changes results: repaired, or as it was published."""


class Part:
    """One choice of one kind: a frozen dataclass of its settings.

    A subclass sets ``name``, its word in yaml. It is found where its file lies in ``home``, the module or the package
    of its kind, where `micro.zoo` lists it, or where an installed package has an entry point for it in ``group``. A
    part with several published behaviours has a setting ``rule``.
    """

    kind: ClassVar[str]
    home: ClassVar[str]
    group: ClassVar[str]
    name: ClassVar[str]

    @property
    def rule_name(self) -> str | None:
        """Which of several published behaviours this is, or None where there is only one."""
        return getattr(self, "rule", None)

    @property
    def full_name(self) -> str:
        """The name, and that of the part inside where there is one."""
        return self.name


@dataclass(slots=True)
class NoState:
    """The state of a part that remembers nothing."""


S = TypeVar("S")
P = TypeVar("P", bound=Part)


class StatefulPart(Part, Generic[S]):
    """A part that may remember something from step to step: an object of ``state``, of plain values, per bucket."""

    state: ClassVar[type[Any]] = NoState

    def start(self) -> S:
        """Return the state before the first step."""
        new: S = self.state()
        return new

    def save(self, state: S) -> dict[str, Any]:
        """Return the state as a plain dictionary."""
        return dict(dataclasses.asdict(state))  # type: ignore[call-overload]

    def load(self, saved: dict[str, Any]) -> S:
        """Return the state that ``save`` described. A part without state ignores what an older version saved."""
        state = self.start()
        return state if isinstance(state, NoState) else type(state)(**saved)

    def regroup(self, state: S, old: Sequence[tuple[Layout, S]], layout: Layout) -> S:
        """Return the state of a new bucket whose parameters lay in the buckets ``old`` before.

        Args:
            state: what the bucket has so far: the state of the one old bucket with the same parameters, in whatever
                order; else a new one. It serves a part that keeps nothing by parameter.
            old: layouts and states of those buckets; states are used up.
            layout: of the new bucket.
        """
        return state

    def rescale_(self, state: S, factor: float) -> None:
        """Multiply what the state holds in units of gradients by ``factor``, because gradients are from now on.

        Thresholds are not changed: methods find them again.
        """


def known(base: type[P]) -> dict[str, type[P]]:
    """Return every class of a kind by name, for instance ``known(Selector)``: micro's own and those of other packages.

    Raises:
        ValueError: a package's part does not load, is not of this kind, or has the name of another part.
    """
    found = dict(_built_in(base))
    for name, entry in installed_parts(base.group).items():
        check_no_collision(base, entry, found)
        found[name] = load_part(base, entry)
    return dict(sorted(found.items()))


def build(base: type[P], spec: str | Mapping[str, Any], **common: Any) -> P:
    """Return the part that ``spec`` describes: a name, or a mapping of ``name`` and settings.

    Args:
        common: settings given to whichever part has them.

    Raises:
        ValueError: no such part, or a setting that it does not have, or a value out of range; see also `known`.
    """
    if not isinstance(spec, str | Mapping):
        raise ValueError(f"{base.kind} must be a name or a mapping of name and settings, got {spec!r}")
    settings = {"name": spec} if isinstance(spec, str) else {str(key): value for key, value in spec.items()}
    part = _find(base, settings.pop("name", None))
    allowed = _fields(part)
    for key in settings:
        if key not in allowed:
            raise ValueError(_not_allowed(base, part, key))
        if key in common:
            raise ValueError(f"{key} of {part.name} is a setting of the whole method: leave it out of its part")
        check_scalar(f"{key} of {part.name}", allowed[key], settings[key])
    settings |= {key: value for key, value in common.items() if key in allowed}
    missing = [name for name in _required(part) if name not in settings]
    if missing:
        raise ValueError(f"{base.kind} {part.name} needs {', '.join(missing)}: give name and settings together")
    return part(**settings)


def as_part(base: type[P], given: P | str | Mapping[str, Any]) -> P:
    """Return ``given`` where it is a part already, or else the part that it describes; see build."""
    return given if isinstance(given, base) else build(base, given)  # type: ignore[arg-type]


def check_rule(part: Part, rules: Sequence[str] = get_args(Rule)) -> None:
    """Raise ValueError unless the part's rule is one of ``rules``."""
    if part.rule_name not in rules:
        raise ValueError(f"rule of {part.name} must be one of {', '.join(rules)}, got '{part.rule_name}'")


def _find(base: type[P], name: Any) -> type[P]:
    """Return the class of this name; of the zoo's and of other packages' parts none but this one is loaded."""
    own, installed = _built_in(base), installed_parts(base.group)
    if isinstance(name, str) and name in installed:
        check_no_collision(base, installed[name], own)
        return load_part(base, installed[name])
    if not isinstance(name, str) or name not in own:
        choices = sorted({*own, *installed})
        raise ValueError(f"{base.kind} must be one of {', '.join(choices)}, got '{name}'{_hint(str(name), choices)}")
    return own[name]


def _built_in(base: type[P]) -> dict[str, type[P]]:
    """Return the classes of a kind that lie in its home, by name."""
    found: dict[str, type[P]] = {}
    for module in _modules(base.home):
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, base) and "name" in vars(cls):
                found[cls.name] = cls
    return dict(sorted(found.items()))


def _required(cls: type[Part]) -> list[str]:
    """Return the settings of a class that have no default."""
    none = dataclasses.MISSING
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    return [field.name for field in fields if field.init and field.default is none and field.default_factory is none]


def _fields(cls: type[Part]) -> dict[str, Any]:
    """Return the settings of a class: their types by name."""
    types = _types(cls)  # type: ignore[arg-type]  # a class, not one of its objects: hashable
    return {field.name: types.get(field.name, Any) for field in dataclasses.fields(cls)}  # type: ignore[arg-type]


@cache
def _types(cls: type[Part]) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except NameError:  # annotations of another package that are there for type checkers alone
        return {}


def _not_allowed(base: type[P], cls: type[P], key: str) -> str:
    """Return the error for a setting that ``cls`` does not have."""
    allowed = [*_fields(cls)]
    return f"{base.kind} {cls.name} has {', '.join(allowed) or 'no settings'}, got '{key}'{_hint(key, allowed)}"


def _modules(home: str) -> Iterator[ModuleType]:
    package = importlib.import_module(home)
    yield package
    for entry in pkgutil.iter_modules(getattr(package, "__path__", [])):
        yield importlib.import_module(f"{home}.{entry.name}")


def _hint(given: str, allowed: list[str]) -> str:
    close = get_close_matches(given, allowed, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
