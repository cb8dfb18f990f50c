"""Every group, choice and key of the configuration in words, read from the comments of conf/ and the dataclasses.

The help text and the pages of docs/ are made from it. Nothing here composes a configuration or imports torch.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from experiments.config.paths import CONF

GROUPS = ("model", "dataset", "sparsifier", "schedule", "cluster", "optimizer", "tracking", "experiment")
_HIDDEN = ("defaults", "hydra")  # keys for Hydra, not settings of a run
_HEADERS = ("# @package", "# label:", "# legend:", "# order:")  # comments for programs


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a yaml file.

    Attributes:
        name: dotted, from the top of the file.
        value: as written in the file.
        comment: the comment behind the value in the file; empty without one.
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
        base: the choice whose values this one extends, None without one.
    """

    name: str
    comment: str
    keys: tuple[Key, ...]
    base: str | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a dataclass.

    Attributes:
        type: as written in the source; the name of a dataclass if the field has keys itself.
        default: as written in the source; None if a configuration must give a value.
        comment: the text for it in the docstring of the dataclass; empty without one.
    """

    type: str
    default: str | None
    comment: str


@dataclass(frozen=True, slots=True)
class Documented:
    """A dataclass of experiments/config: the text of its docstring, and its fields by name."""

    about: str
    fields: dict[str, Field]


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


def described(group: str) -> list[Key]:
    """Return every key of a group: the fields of its dataclass, described there or by a comment in one of its files.

    The value is the default of a run. Settings of a single model, data set or schedule are in its file, and are not
    returned here.
    """
    commented = _commented(group)
    default = default_choices().get(group)
    values = {key.name: key.value for key in choices(group)[default].keys} if default else {}
    keys = []
    for name, field in _flat(f"{group.capitalize()}Config"):
        if name.split(".")[0] in ("name", "settings"):
            continue
        comment = field.comment or commented.get(name, "")
        keys.append(Key(name, values.get(name, field.default or ""), comment))
    return keys


def _commented(group: str) -> dict[str, str]:
    """Return the comment of each key in a group's files: from the default choice, else from the first file."""
    default = default_choices().get(group)
    in_order = sorted(choices(group).values(), key=lambda choice: choice.name != default)
    found: dict[str, str] = {}
    for choice in in_order:
        for key in choice.keys:
            if key.comment:
                found.setdefault(key.name, key.comment)
    return found


def _flat(name: str, prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Yield the fields of a dataclass with dotted names; a field that is a dataclass is replaced by its fields."""
    known = dataclasses()
    if name not in known:
        return
    for key, field in known[name].fields.items():
        if field.type in known:
            yield from _flat(field.type, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", field


def read(path: Path) -> Choice:
    """Read a yaml file: its opening comment, keys and base."""
    text = path.read_text()
    lines = text.splitlines()
    root = yaml.compose(text)
    assert isinstance(root, MappingNode)
    keys = tuple(key for key in _keys(root, "", lines) if key.name.split(".")[0] not in _HIDDEN)
    return Choice(path.stem, _opening(lines), keys, _base(root))


def _opening(lines: list[str]) -> str:
    opening = []
    for line in lines:
        if not line.startswith("#"):
            break
        if not line.startswith(_HEADERS):
            opening.append(line.removeprefix("#").strip())
    return " ".join(opening)


def _base(root: MappingNode) -> str | None:
    for key, value in root.value:
        if key.value == "defaults":
            named = [entry.value for entry in value.value if isinstance(entry, ScalarNode)]
            return next((name for name in named if name not in ("_self_", "schema")), None)
    return None


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


@cache
def dataclasses() -> dict[str, Documented]:
    """Return the dataclasses of this folder with their descriptions, by name."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
                found[node.name] = _documented(node)
    return found


def _documented(node: ast.ClassDef) -> Documented:
    about, _, attributes = (ast.get_docstring(node) or "").partition("\nAttributes:\n")
    comments = _attributes(attributes)
    fields = {
        line.target.id: Field(ast.unparse(line.annotation), _default(line.value), comments.get(line.target.id, ""))
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    return Documented(" ".join(about.split()), fields)


def _default(value: ast.expr | None) -> str | None:
    """Return a field's default as it would be written in yaml."""
    if value is None:
        return None
    source = ast.unparse(value)
    made = {"field(default_factory=dict)": "{}", "field(default_factory=list)": "[]"}
    return made.get(source) or {"None": "null", "True": "true", "False": "false"}.get(source) or source.strip("'")


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
