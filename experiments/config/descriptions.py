"""Every group, choice and key of the configuration in words, read from the comments of conf/ and the dataclasses.

The help text and the pages of docs/ are made from it. Nothing here composes a configuration or imports torch.
"""

import dataclasses
import inspect
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from yaml.nodes import MappingNode, Node

from experiments.config.paths import CONF
from experiments.config.schema import TrainConfig

GROUPS = ("model", "dataset", "sparsifier", "schedule", "cluster", "optimizer", "tracking", "experiment")
_HIDDEN = ("defaults", "hydra")  # keys for Hydra, not settings of a run
_HEADERS = ("# @package", "# label:", "# legend:", "# order:")  # comments for programs


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a yaml file or field of a dataclass.

    Attributes:
        name: dotted, from the top of the file.
        value: as written in yaml.
        comment: the comment behind the value in the file, or the text of the attribute; empty without one.
    """

    name: str
    value: str
    comment: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One file of a group.

    Attributes:
        comment: the lines that open the file.
        keys: in the order of the file; a mapping written on one line is one key.
    """

    name: str
    comment: str
    keys: tuple[Key, ...]


def train_keys() -> tuple[Key, ...]:
    """Return the keys of conf/train.yaml, which are in no group, by their names on the command line."""
    return read(CONF / "train.yaml").keys


def default_choices() -> dict[str, str]:
    """Return the default choice of each group."""
    entries = yaml.safe_load((CONF / "train.yaml").read_text())["defaults"]
    pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
    return {group: choice for group, choice in pairs if group in GROUPS and choice}


@cache
def choices(group: str) -> dict[str, Choice]:
    """Return the choices of a group, by name."""
    return {path.stem: read(path) for path in sorted((CONF / group).glob("*.yaml"))}


def about(group: str) -> str:
    """Return what a group is, from its dataclass; empty where it has none."""
    kind = _kinds(TrainConfig).get(group)
    return " ".join((inspect.getdoc(kind) or "").partition("\nAttributes:\n")[0].split()) if kind else ""


def described(group: str) -> list[Key]:
    """Return every key of a group: the fields of its dataclass, described there or by a comment in one of its files.

    The value is the default of a run. Settings of a single model, data set or schedule are in its file, and are not
    returned here.
    """
    if group not in _kinds(TrainConfig):
        return []
    default = default_choices().get(group)
    files = sorted(choices(group).values(), key=lambda choice: choice.name != default)
    comments = {key.name: key.comment for choice in reversed(files) for key in choice.keys if key.comment}
    values = {key.name: key.value for key in files[0].keys} if default else {}
    return [
        Key(key.name, values.get(key.name, key.value), key.comment or comments.get(key.name, ""))
        for key in _fields(_kinds(TrainConfig)[group])
        if key.name.split(".")[0] not in ("name", "settings")
    ]


def _kinds(kind: type) -> dict[str, type]:
    """Return the fields of a dataclass that are dataclasses themselves."""
    hints = typing.get_type_hints(kind).items()
    return {name: cast(type, hint) for name, hint in hints if dataclasses.is_dataclass(hint)}


def _fields(kind: type, prefix: str = "") -> Iterator[Key]:
    """Yield the fields of a dataclass with dotted names; a field that is a dataclass is replaced by its fields."""
    comments = _attributes((inspect.getdoc(kind) or "").partition("\nAttributes:\n")[2])
    defaults = OmegaConf.structured(kind)
    for field in dataclasses.fields(kind):
        if field.name in _kinds(kind):
            yield from _fields(_kinds(kind)[field.name], f"{prefix}{field.name}.")
        else:
            yield Key(f"{prefix}{field.name}", _written(defaults, field.name), comments.get(field.name, ""))


def _written(defaults: Any, name: str) -> str:
    """Return the default of a field as it is written in yaml, empty without one."""
    if OmegaConf.is_missing(defaults, name):
        return ""
    value = OmegaConf.to_container(defaults)[name]  # type: ignore[call-overload, index]
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


def _attributes(section: str) -> dict[str, str]:
    """Return the texts under ``Attributes:`` by name; several names may share a text."""
    comments: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        head, colon, rest = line.strip().partition(": ")
        listed = head.split(", ")
        if colon and all(map(str.isidentifier, listed)) and line.startswith("    ") and not line.startswith("     "):
            names = listed
            comments |= dict.fromkeys(names, rest)
        elif line.strip():
            comments |= {name: f"{comments[name]} {line.strip()}" for name in names}
    return comments


def read(path: Path) -> Choice:
    """Read a yaml file: its opening comment and its keys."""
    text = path.read_text()
    lines = text.splitlines()
    root = yaml.compose(text)
    assert isinstance(root, MappingNode)
    keys = tuple(key for key in _keys(root, "", lines) if key.name.split(".")[0] not in _HIDDEN)
    return Choice(path.stem, _opening(lines), keys)


def _opening(lines: list[str]) -> str:
    opening = []
    for line in lines:
        if not line.startswith("#"):
            break
        if not line.startswith(_HEADERS):
            opening.append(line.removeprefix("#").strip())
    return " ".join(opening)


def _keys(mapping: MappingNode, prefix: str, lines: list[str]) -> Iterator[Key]:
    for key, value in mapping.value:
        name = f"{prefix}{key.value}"
        if isinstance(value, MappingNode) and not value.flow_style:
            yield from _keys(value, f"{name}.", lines)
        else:
            yield Key(name, _text(value, lines), _comment(key, value, lines))


def _text(value: Node, lines: list[str]) -> str:
    start, end = value.start_mark, value.end_mark
    if start.line == end.line:
        return lines[start.line][start.column : end.column]
    return " ".join(line.split(" #")[0].strip() for line in lines[start.line : end.line + 1])


def _comment(key: Node, value: Node, lines: list[str]) -> str:
    """Return the comment behind a value, or behind its key if the value is a block."""
    end = value.end_mark if value.end_mark.line == value.start_mark.line else key.end_mark
    return lines[end.line][end.column :].partition("#")[2].strip()
