"""Find and build parts (selectors, exchanges, codecs ...) by their names in yaml files.

Another package adds parts through entry points. For a selector, its pyproject.toml has:

    [project.entry-points."micro.selectors"]
    smallest = "its_module:Smallest"

where ``Smallest`` is a frozen dataclass derived from ``micro.Selector`` with ``name = "smallest"``. The groups, and the
base classes of their parts:

    micro.selectors      micro.Selector         micro.feedback     micro.Feedback
    micro.exchanges      micro.Exchange         micro.densities    micro.Density
    micro.codecs         micro.Codec            micro.reducers     micro.Reducer
    micro.index_codecs   micro.IndexCodec       micro.schedules    a Schedule of experiments.planning
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args, get_type_hints

from micro import retired, zoo
from micro.values.flat import Layout
from micro.values.scalars import check_scalar

Rule = Literal["repaired", "published"]
"""For methods whose public code has a defect that changes results: 'repaired', or 'published' as it is."""


class Part:
    """One choice of one kind: a frozen dataclass of its settings.

    A subclass sets ``name``, its name in yaml. micro looks for it in ``home`` (the module or package of its kind), in
    the list of `micro.zoo`, and in the entry points ``group`` of installed packages. A part with several published
    behaviours has a setting ``rule``.
    """

    kind: ClassVar[str]
    home: ClassVar[str]
    group: ClassVar[str]
    name: ClassVar[str]

    @property
    def rule_name(self) -> str | None:
        """The value of ``rule``, or None if the part has no such setting."""
        return getattr(self, "rule", None)

    @property
    def full_name(self) -> str:
        """The name, followed by that of the wrapped part if there is one."""
        return self.name


@dataclass(slots=True)
class NoState:
    """The state of a part that remembers nothing."""


S = TypeVar("S")
P = TypeVar("P", bound=Part)


class StatefulPart(Part, Generic[S]):
    """A part that may keep a state per bucket from step to step: an object of class ``state``, with plain values."""

    state: ClassVar[type[Any]] = NoState

    def start(self) -> S:
        """Return the state before the first step."""
        new: S = self.state()
        return new

    def save(self, state: S) -> dict[str, Any]:
        """Return the state as a plain dictionary."""
        return dict(dataclasses.asdict(state))  # type: ignore[call-overload]

    def load(self, saved: dict[str, Any]) -> S:
        """Return the state from what ``save`` returned. Fields that only older versions had are ignored."""
        return state_of(type(self.start()), saved)

    def regroup(self, state: S, old: Sequence[tuple[Layout, S]], layout: Layout) -> S:
        """Return the state of a new bucket whose parameters came from the buckets ``old``.

        Args:
            state: if one old bucket has the same parameters, in any order, its state; otherwise a new one. Enough for a
                part that keeps nothing by parameter.
            old: layouts and states of those buckets; the states may be modified.
            layout: of the new bucket.
        """
        return state

    def rescale_(self, state: S, factor: float) -> None:
        """Multiply what the state holds in units of gradients by ``factor``, after the loss scale changed by it.

        Thresholds stay: methods adjust them anyway.
        """


def state_of(kind: type[S], saved: Mapping[str, Any]) -> S:
    """Return the dataclass ``kind`` from its saved fields, ignoring unknown ones."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in saved.items() if key in names})


def known(base: type[P]) -> dict[str, type[P]]:
    """Return every class of a kind by name, from micro and from other packages: ``known(Selector)``.

    Raises:
        ValueError: a package's part does not load, is not of this kind, or repeats the name of another part.
    """
    return {name: _load(base, name) for name in sorted({*_built_in(base), *_installed(base.group)})}


def build(base: type[P], spec: str | Mapping[str, Any], **common: Any) -> P:
    """Return the part that ``spec`` describes: a name, or a mapping of ``name`` and settings.

    Args:
        common: settings that are passed if the part has them.

    Raises:
        ValueError: no such part or setting, or a value out of range; see also `known`.
    """
    if not isinstance(spec, str | Mapping):
        raise ValueError(f"{base.kind} must be a name or a mapping of name and settings, got {spec!r}")
    settings = {"name": spec} if isinstance(spec, str) else {str(key): value for key, value in spec.items()}
    part = _load(base, settings.pop("name", None))
    fields = dataclasses.fields(part)  # type: ignore[arg-type]
    names, types = [field.name for field in fields], _types(part)  # type: ignore[arg-type]  # a class is hashable
    for key, value in settings.items():
        gone = retired.refusal_of_setting(part.name, key) or retired.refusal_of_setting(part.name, f"{key}={value}")
        if gone:
            raise ValueError(gone)
        if key not in names:
            has = ", ".join(names) or "no settings"
            raise ValueError(f"{base.kind} {part.name} has {has}, got '{key}'{_hint(key, names)}")
        if key in common:
            raise ValueError(f"{key} of {part.name} is a setting of the whole method: leave it out of its part")
        check_scalar(f"{key} of {part.name}", types.get(key, Any), value)
    settings |= {key: value for key, value in common.items() if key in names}
    none = dataclasses.MISSING
    required = [field.name for field in fields if field.init and field.default is field.default_factory is none]
    missing = [name for name in required if name not in settings]
    if missing:
        raise ValueError(f"{base.kind} {part.name} needs {', '.join(missing)}: give name and settings together")
    return part(**settings)


def as_part(base: type[P], given: P | str | Mapping[str, Any]) -> P:
    """Return ``given`` if it is a part, otherwise the part that it describes; see build."""
    return given if isinstance(given, base) else build(base, given)  # type: ignore[arg-type]


def check_rule(part: Part, rules: Sequence[str] = get_args(Rule)) -> None:
    """Raise ValueError unless the part's rule is one of ``rules``."""
    if part.rule_name not in rules:
        gone = retired.refusal_of_setting(part.name, f"rule={part.rule_name}")
        raise ValueError(gone or f"rule of {part.name} must be one of {', '.join(rules)}, got '{part.rule_name}'")


def _load(base: type[P], name: Any) -> type[P]:
    """Return the class of this name, without importing other parts of the zoo or of other packages."""
    own, installed = _built_in(base), _installed(base.group)
    if name in own and name not in installed:
        return own[name]
    if not isinstance(name, str) or name not in installed:
        choices, gone = sorted({*own, *installed}), retired.refusal_of_part(base.kind, str(name))
        allowed = f"{base.kind} must be one of {', '.join(choices)}, got '{name}'{_hint(str(name), choices)}"
        raise ValueError(gone or allowed)
    entry = installed[name]
    where = f"{base.kind} '{name}' of package {_package(entry)}"
    if name in own:
        raise ValueError(f"{where} has the name of a {base.kind} of micro: rename it there, or uninstall the package")
    try:
        part: Any = entry.load()
    except Exception as error:  # whatever importing another package's code may raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{where} does not load ({reason}): repair or uninstall the package") from error
    if not (isinstance(part, type) and issubclass(part, base) and dataclasses.is_dataclass(part)):
        raise ValueError(f"{where} must be a dataclass derived from {base.__name__}, got {entry.value}")
    if vars(part).get("name") != name:
        raise ValueError(f"{where} must have its entry point's name, got '{vars(part).get('name')}': use one name")
    return part


def _built_in(base: type[P]) -> dict[str, type[P]]:
    """Return the classes of a kind in its home, by name."""
    package = importlib.import_module(base.home)
    files = pkgutil.iter_modules(getattr(package, "__path__", []))
    modules = [package, *(importlib.import_module(f"{base.home}.{file.name}") for file in files)]
    classes = [each for module in modules for each in vars(module).values() if isinstance(each, type)]
    return {each.name: each for each in classes if issubclass(each, base) and "name" in vars(each)}


@cache
def _installed(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group such as ``micro.selectors``, and the zoo's, by name; nothing is imported."""
    places = zoo.PARTS.get(group, {})
    found = {name: EntryPoint(name, f"{zoo.__name__}.{place}", group) for name, place in places.items()}
    for entry in entry_points(group=group):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            packages = f"{_package(other)} and {_package(entry)}"
            raise ValueError(f"packages {packages} both bring '{entry.name}' of {group}: uninstall one of them")
    return found


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else zoo.__name__


@cache
def _types(cls: type[Part]) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except NameError:  # annotations of another package that only type checkers can resolve
        return {}


def _hint(given: str, allowed: list[str]) -> str:
    close = get_close_matches(given, allowed, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
