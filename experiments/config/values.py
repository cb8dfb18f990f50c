"""Plain values of a configuration: set one, and convert all of them to the dataclasses of schema.py."""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache, lru_cache
from typing import Any

from experiments.config.errors import UserError, short, suggestion
from experiments.config.schema import TrainConfig

Flat = dict[str, Any]  # settings by dotted keys

MISSING = "???"  # a setting that has no value yet
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


def flat(node: Mapping[str, Any], prefix: str = "") -> Flat:
    """Return nested settings by dotted keys; an empty mapping is a value."""
    found: Flat = {}
    for key, value in node.items():
        inner = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


def defaults_of_schema(kind: type = TrainConfig) -> dict[str, Any]:
    """Return the default of every setting of a dataclass and of its inner dataclasses, MISSING without one."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        inner = _type_of(kind, field.name)
        if dataclasses.is_dataclass(inner):
            values[field.name] = defaults_of_schema(typing.cast(type, inner))
        elif field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
        else:
            values[field.name] = MISSING
    return values


@lru_cache(maxsize=1)
def groups_of_settings() -> frozenset[str]:
    """Return the dotted names of groups of settings: model, density_warmup, cluster.slurm, ..."""
    return frozenset(_groups(TrainConfig, ""))


def _groups(kind: type, prefix: str) -> typing.Iterator[str]:
    for field in dataclasses.fields(kind):
        inner = _type_of(kind, field.name)
        if dataclasses.is_dataclass(inner):
            yield f"{prefix}{field.name}"
            yield from _groups(typing.cast(type, inner), f"{prefix}{field.name}.")


def set_value_(values: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a setting by its dotted name. Raises: UserError: no such setting, or it is a group."""
    *parents, last = key.split(".")
    node = values
    for depth, name in enumerate(parents):
        _check_key(node, name, parents[:depth])
        if not isinstance(node[name], dict):
            raise UserError(_no_settings(".".join(parents[: depth + 1]), node[name], key, value))
        node = node[name]
    _check_key(node, last, parents)
    _replace_(node, last, value, key)


def _replace_(node: dict[str, Any], name: str, value: Any, key: str) -> None:
    old = node[name]
    if isinstance(old, dict) and isinstance(value, dict):
        for inner, given in value.items():
            _check_key(old, inner, key.split("."))
            _replace_(old, inner, given, f"{key}.{inner}")
        return
    if key in groups_of_settings():
        known, first = ", ".join(old), f"{key}.{next(iter(old))}"
        raise UserError(f"{key} holds several settings ({known}), got {shown(value)}: set one, {first}=VALUE")
    node[name] = value


def _check_key(node: dict[str, Any], name: str, parents: list[str]) -> None:
    if name not in node:
        where, keys = ".".join(parents) or "the configuration", [str(key) for key in node]
        allowed = f"which has {', '.join(keys)}" if keys else "which has none"
        raise UserError(f"'{short(name)}' is not a key of {where}, {allowed}{suggestion(name, keys)}")


def _no_settings(parent: str, held: Any, key: str, value: Any) -> str:
    if key == f"{parent}.name":
        return f"{parent} is {shown(held)}, a name without settings: to choose another, set {parent}={value}"
    inner = key.removeprefix(f"{parent}.")
    return (
        f"{parent} is {shown(held)} and has no settings in this configuration: "
        f"give name and settings together, '{parent}={{name: {held or 'NAME'}, {inner}: {shown(value)}}}'"
    )


def to_dataclass(values: Mapping[str, Any], kind: type = TrainConfig, prefix: str = "") -> Any:
    """Return plain values as a dataclass. Raises: UserError: an unknown key, or a value missing or of another type."""
    known = {field.name: field for field in dataclasses.fields(kind)}
    for key in map(str, values):
        if key not in known:
            raise UserError(f"'{prefix}{key}' is not a key of the configuration{suggestion(key, known)}")
    typed = {}
    for name, field in known.items():
        given = values.get(name, MISSING)
        inner = _type_of(kind, name)
        if given == MISSING:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise UserError(_missing(f"{prefix}{name}", is_group=dataclasses.is_dataclass(inner)))
        else:
            typed[name] = _converted(inner, given, f"{prefix}{name}")
    return kind(**typed)


def _missing(key: str, *, is_group: bool) -> str:
    return (
        f"'{key}' is missing: choose one, for instance {key}=NAME"
        if is_group
        else f"'{key}' is missing from the configuration: set it, {key}=VALUE"
    )


def _converted(kind: Any, value: Any, key: str) -> Any:
    if kind is Any:
        return deepcopy(value)
    if isinstance(kind, types.UnionType):
        return (
            None
            if value is None
            else _converted(next(part for part in kind.__args__ if part is not type(None)), value, key)
        )
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise UserError(f"'{key}' is missing: choose one, for instance {key}=NAME")
        return to_dataclass(value, typing.cast(type, kind), f"{key}.")
    origin = typing.get_origin(kind) or kind
    if origin is list:
        if not isinstance(value, list):
            raise UserError(f"{key} must be a list, got {shown(value)}: write '{key}=[...]'")
        return [_converted(typing.get_args(kind)[0], item, key) for item in value]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise UserError(f"{key} must be a mapping, got {shown(value)}: write '{key}={{NAME: VALUE}}'")
        return deepcopy(dict(value))
    convert, words = _SCALARS[kind]
    try:
        return convert(value)
    except (ValueError, TypeError, OverflowError):
        raise UserError(f"{key} must be {words}, got {shown(value)}") from None


def shown(value: Any) -> str:
    """Return a value as a user would write it."""
    if isinstance(value, str):
        return f"'{short(value)}'"
    return {None: "null", True: "true", False: "false"}[value] if isinstance(value, bool | None) else short(str(value))


def _integer(value: Any) -> int:
    if type(value) not in (int, str) or not str(value).isascii():
        raise ValueError
    return int(value)


def _number(value: Any) -> float:
    if type(value) not in (int, float, str) or not str(value).isascii():
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _boolean(value: Any) -> bool:
    word = str(value).lower()
    if word not in (*_TRUE, *_FALSE, "0", "1"):
        raise ValueError
    return word in (*_TRUE, "1")


def _text(value: Any) -> str:
    if value is None or isinstance(value, list | Mapping):
        raise ValueError
    return str(value)


_SCALARS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    int: (_integer, "a whole number"),
    float: (_number, "a finite number"),
    bool: (_boolean, "true or false"),
    str: (_text, "a word"),
}


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _type_of(kind: type, name: str) -> Any:
    return _hints(kind)[name]
