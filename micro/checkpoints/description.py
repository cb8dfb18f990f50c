"""Describe a reducer, with all parts and settings, as plain data that a checkpoint can store and compare."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from micro.parts import NoState, Part, StatefulPart

MAY_CHANGE = frozenset({"density", "nonfinite", "seed", "only", "dense", "min_dims", "start_step"})
"""Settings that may differ from the saved ones: no state depends on them, or (Split) parameter names show it.

A density that has a state must stay of the same kind.
"""


def describe(value: Any) -> Any:
    """Return a part, or a setting, as dictionaries, lists, strings and numbers."""
    if isinstance(value, Part):
        return _identity(value) | {"settings": _settings(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _settings(value)
    if isinstance(value, Mapping):
        return {str(key): describe(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [describe(each) for each in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__qualname__", None) or f"{type(value).__qualname__}"


def difference(first: Any, second: Any) -> tuple[str, str] | None:
    """Return the first difference of two descriptions, as a text for each; None if they are equal."""
    return _difference("", first, second)


def misfit(saved: Any, own: Any) -> tuple[str, str] | None:
    """Return the difference that makes a saved state unusable, or None; the settings MAY_CHANGE may differ."""
    return difference(_without_changeable(saved), _without_changeable(own))


def _identity(part: Part) -> dict[str, Any]:
    has_state = isinstance(part, StatefulPart) and not isinstance(part.start(), NoState)
    return {"name": part.name, "rule": getattr(part, "rule", None), "has_state": has_state}


def _settings(value: Any) -> dict[str, Any]:
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return {field.name: describe(getattr(value, field.name)) for field in fields}


def _without_changeable(description: Any) -> Any:
    """Return a description without the settings that may change."""
    if isinstance(description, list):
        return [_without_changeable(each) for each in description]
    if not isinstance(description, dict):
        return description
    kept = {key: _without_changeable(value) for key, value in description.items() if key not in MAY_CHANGE}
    if "density" in description:
        policy = description["density"]
        kept["density"] = _label(policy) if isinstance(policy, dict) and policy.get("has_state") else "schedule"
    return kept


def _difference(place: str, saved: Any, own: Any) -> tuple[str, str] | None:
    if saved == own:
        return None
    if _is_part(saved) and _is_part(own) and _label(saved) == _label(own):
        inner = f"{place} {_label(own)}" if place else ""  # both have the outermost reducer: not named
        return _difference(inner, saved["settings"], own["settings"])
    if isinstance(saved, dict) and isinstance(own, dict) and not (_is_part(saved) or _is_part(own)):
        for key in dict.fromkeys([*own, *saved]):
            found = _difference(f"{place} {key}".strip(), saved.get(key), own.get(key))
            if found is not None:
                return found
        return None  # None is equal to a missing setting
    joint = " " if (_is_part(saved) and _is_part(own)) or not place else "="
    return f"{place}{joint}{_label(saved)}".strip(), f"{place}{joint}{_label(own)}".strip()


def _is_part(description: Any) -> bool:
    return isinstance(description, dict) and "settings" in description


def _label(description: Any) -> str:
    if not _is_part(description):
        return str(description)
    rule = description.get("rule")
    return f"{description['name']} ({rule})" if rule else str(description["name"])
