"""Settings as plain values: by dotted keys, and the defaults of the schema."""

import dataclasses
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

from experiments.config.schema import TrainConfig

Flat = dict[str, Any]  # settings by dotted keys

MISSING = "???"  # a setting that has no value yet


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
        inner = _types(kind)[field.name]
        if dataclasses.is_dataclass(inner):
            values[field.name] = defaults_of_schema(typing.cast(type, inner))
        elif field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
        else:
            values[field.name] = MISSING
    return values


@cache
def _types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
