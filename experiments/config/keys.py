"""Convert the settings of a run to dotted keys and to yaml."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import IO, Any, cast, get_args, get_type_hints

from omegaconf import OmegaConf

from experiments.config.ranges import Allowed
from experiments.config.schema import TrainConfig

Flat = dict[str, Any]  # settings by dotted keys


def flat(node: Mapping[str, Any], prefix: str = "") -> Flat:
    """Return nested settings by dotted keys; an empty mapping is a value."""
    found: Flat = {}
    for key, value in node.items():
        inner = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


def limits(settings: Any, group: str = "") -> Iterator[tuple[str, Any, str, Allowed]]:
    """Yield each limited setting below a dataclass: its dotted key, its dataclass, its name there, its limits."""
    for each in dataclasses.fields(settings):
        key = f"{group}.{each.name}".strip(".")
        if is_dataclass(inner := getattr(settings, each.name)):
            yield from limits(inner, key)
        elif allowed := each.metadata.get("allowed"):
            yield key, settings, each.name, allowed


def kind_of(key: str) -> tuple[Any, Allowed | None]:
    """Return the type of a setting without ``| None`` (Any in a mapping of settings), and its limits."""
    kind: Any = TrainConfig
    allowed = None
    for name in filter(None, key.split(".")):
        if not is_dataclass(kind):
            return Any, None
        allowed = next((each.metadata.get("allowed") for each in dataclasses.fields(kind) if each.name == name), None)
        kind = get_type_hints(kind).get(name, Any)
        if type(None) in get_args(kind):
            kind = get_args(kind)[0]
    return kind, allowed


def defaults_of_schema(kind: type = TrainConfig) -> dict[str, Any]:
    """Return the default of every setting of a dataclass and of its inner dataclasses, MISSING without one."""
    values = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(kind)))
    inner = {name: hint for name, hint in get_type_hints(kind).items() if is_dataclass(hint)}
    return values | {name: defaults_of_schema(cast(type, hint)) for name, hint in inner.items()}


def to_yaml(config: TrainConfig) -> str:
    """Return the configuration as yaml, complete."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(source: Path | IO[str]) -> TrainConfig:
    """Return the configuration that ``to_yaml`` wrote."""
    loaded = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.load(source)))
    assert isinstance(loaded, TrainConfig)
    return loaded
