"""Every group, choice and key of the configuration in words, read from the comments of conf/ and the dataclasses.

The page of the configuration is made from it. Nothing here composes a configuration or imports torch.
"""

import inspect
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from experiments.config import CONF
from experiments.config.keys import defaults_of_schema
from experiments.config.schema import GROUPS, TrainConfig

_HIDDEN = ("defaults", "hydra")  # keys for Hydra, not settings of a run
_HEADERS = ("# @package", "# label:", "# legend:", "# order:")  # comments for programs
_LINE = re.compile(r"( *)(\w+):(?: +([^#\s].*?))?(?: +# ?(.*))?")  # indent, key, value, comment
_ATTRIBUTE = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)


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
    """One file of a group: the comment that opens it, and its keys; a mapping written on one line is one key."""

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
    kind = typing.get_type_hints(TrainConfig).get(group)
    return " ".join((inspect.getdoc(kind) or "").partition("\nAttributes:\n")[0].split()) if kind else ""


def described(group: str) -> list[Key]:
    """Return every key of a group: the fields of its dataclass, described there or by a comment in one of its files.

    The value is the default of a run. Settings of a single model, data set or schedule are in its file, and are not
    returned here.
    """
    kind = typing.get_type_hints(TrainConfig).get(group)
    if kind is None:
        return []
    default = default_choices().get(group)
    files = sorted(choices(group).values(), key=lambda choice: choice.name != default)
    comments = {key.name: key.comment for choice in reversed(files) for key in choice.keys if key.comment}
    values = {key.name: key.value for key in files[0].keys} if default else {}
    return [
        Key(key.name, values.get(key.name, key.value), key.comment or comments.get(key.name, ""))
        for key in _fields(kind, defaults_of_schema(kind))
        if key.name.split(".")[0] not in ("name", "settings")
    ]


def read(path: Path) -> Choice:
    """Read a yaml file of conf/: its opening comment and its keys."""
    lines = path.read_text().splitlines()
    opening = [line for line in takewhile(lambda line: line.startswith("#"), lines) if not line.startswith(_HEADERS)]
    keys: list[Key] = []
    outer: list[tuple[int, str]] = []  # indents and names of the mappings around a line
    for found in filter(None, map(_LINE.fullmatch, lines)):
        indent, name, value, comment = len(found[1]), *found.groups()[1:]
        outer = [each for each in outer if each[0] < indent]
        if value is None:
            outer.append((indent, name))
        else:
            keys.append(Key(".".join([*(each[1] for each in outer), name]), value, (comment or "").strip()))
    shown = tuple(key for key in keys if key.name.split(".")[0] not in _HIDDEN)
    return Choice(path.stem, " ".join(line.removeprefix("#").strip() for line in opening), shown)


def _fields(kind: Any, defaults: dict[str, Any], prefix: str = "") -> Iterator[Key]:
    """Yield the fields of a dataclass with dotted names; a field that is a dataclass is replaced by its fields."""
    documented = _ATTRIBUTE.findall((inspect.getdoc(kind) or "").partition("\nAttributes:\n")[2])
    comments = {name: " ".join(text.split()) for names, text in documented for name in names.split(", ")}
    for field in fields(kind):
        value = defaults[field.name]
        if is_dataclass(inner := typing.get_type_hints(kind)[field.name]):
            yield from _fields(inner, value, f"{prefix}{field.name}.")
            continue
        written = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
        yield Key(f"{prefix}{field.name}", "" if value == "???" else written, comments.get(field.name, ""))
