"""A reducer in words: its parts with all their settings, as plain data that a checkpoint can hold and compare."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from micro.parts import NoState, Part, StatefulPart

MAY_CHANGE = frozenset({"density", "nonfinite", "seed", "only", "dense", "min_dims", "start_step"})
"""Settings that no state depends on, or that are checked by the parameters that the state holds (Split's).

A density with a state of its own must stay of its kind.
"""


def describe(value: Any) -> Any:
    """Return a part, or any setting of one, as dictionaries, lists, texts and numbers."""
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
    """Return in words where two descriptions differ first, the words of each; None where they are the same."""
    return _difference("", first, second)


def misfit(saved: Any, own: Any) -> tuple[str, str] | None:
    """Return the difference because of which a state that was saved does not fit; None where it fits.

    What may change between runs, MAY_CHANGE, is left out of the comparison.
    """
    return difference(_fixed(saved), _fixed(own))


def _identity(part: Part) -> dict[str, Any]:
    has_state = isinstance(part, StatefulPart) and not isinstance(part.start(), NoState)
    return {"name": part.name, "rule": getattr(part, "rule", None), "has_state": has_state}


def _settings(value: Any) -> dict[str, Any]:
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return {field.name: describe(getattr(value, field.name)) for field in fields}


def _fixed(description: Any) -> Any:
    """Return a description without the settings that may change."""
    if isinstance(description, list):
        return [_fixed(each) for each in description]
    if not isinstance(description, dict):
        return description
    kept = {key: _fixed(value) for key, value in description.items() if key not in MAY_CHANGE}
    if "density" in description:
        policy = description["density"]
        kept["density"] = _word(policy) if isinstance(policy, dict) and policy.get("has_state") else "schedule"
    return kept


def _difference(place: str, saved: Any, own: Any) -> tuple[str, str] | None:
    if saved == own:
        return None
    if _is_part(saved) and _is_part(own) and _word(saved) == _word(own):
        inner = f"{place} {_word(own)}" if place else ""  # of the reducer itself, which both have, nothing is said
        return _difference(inner, saved["settings"], own["settings"])
    if isinstance(saved, dict) and isinstance(own, dict) and not (_is_part(saved) or _is_part(own)):
        for key in dict.fromkeys([*own, *saved]):
            found = _difference(f"{place} {key}".strip(), saved.get(key), own.get(key))
            if found is not None:
                return found
        return None  # a setting that is None, and one that is not there
    joint = " " if (_is_part(saved) and _is_part(own)) or not place else "="
    return f"{place}{joint}{_word(saved)}".strip(), f"{place}{joint}{_word(own)}".strip()


def _is_part(description: Any) -> bool:
    return isinstance(description, dict) and "settings" in description


def _word(description: Any) -> str:
    if not _is_part(description):
        return str(description)
    rule = description.get("rule")
    return f"{description['name']} ({rule})" if rule else str(description["name"])
