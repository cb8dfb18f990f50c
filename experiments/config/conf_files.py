"""Compose the settings of a run from the files of conf/: the layers of conf/train.yaml, in Hydra's order.

Hydra composes one configuration in about 0.1 s; a study has up to a hundred. This module reads each file once. Of
Hydra's defaults lists it supports what conf/ uses: NAME (another file of the same group), {GROUP: NAME},
{override /GROUP: NAME} and _self_. A test compares it with Hydra for every file of conf/.
"""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from experiments.config.errors import UserError, one_line
from experiments.config.paths import CONF
from experiments.config.values import defaults_of_schema

Values = dict[str, Any]
_WHOLE = ("model", "dataset")  # an experiment does not change these groups if the command line sets them
_GLOBAL = "# @package _global_"  # the header of a file whose keys are those of the run, not of its group


@cache
def read_yaml(path: Path) -> Values:
    """Return what a file of conf/ holds; the caller must not change it. Raises: UserError: it cannot be read."""
    try:
        content = yaml.load(path.read_text(), Loader=_Loader) or {}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"cannot read {path}: it is not text in UTF-8") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: a number of thousands of digits
        raise UserError(f"cannot read {path}: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must be a mapping of settings")
    return content


def choices_of(group: str) -> list[str]:
    """Return the names that a group can be set to."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def compose_layers(chosen: Mapping[str, str]) -> Values:
    """Return the settings of a run before single values are set, as plain values with unresolved interpolations.

    Args:
        chosen: the choice of each group that the command line names.
    """
    return deepcopy(_layers(tuple(sorted(chosen.items()))))


@lru_cache(maxsize=512)
def _layers(chosen: tuple[tuple[str, str], ...]) -> Values:
    primary, own = read_yaml(CONF / "train.yaml"), dict(chosen)
    choices = {**_listed(primary), **own}
    experiment = choices.pop("experiment", None)
    files = list(_with_bases("experiment", experiment)) if experiment else []
    for file in files:  # a later file overrides an earlier one
        choices.update({group: name for group, name in _overridden(file).items() if group not in own})
    values = defaults_of_schema()
    for group, name in choices.items():
        for file in _with_bases(group, name):
            merge_(values, {group: _own_keys(file)})
    merge_(values, _own_keys(primary))
    before = {group: deepcopy(values[group]) for group in _WHOLE}
    for file in files:
        merge_(values, _own_keys(file))
    if files:
        values.update({group: before[group] for group in _WHOLE if group in own})
    return values


def merge_(values: Values, more: Mapping[str, Any]) -> None:
    """Merge ``more`` into ``values``: mappings are merged, other values are replaced."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            merge_(values[key], value)
        else:
            values[key] = deepcopy(value)


def _listed(primary: Values) -> dict[str, str]:
    """Return the choices that the defaults list of conf/train.yaml names."""
    pairs = [pair for entry in primary["defaults"] if isinstance(entry, dict) for pair in entry.items()]
    return {
        group.removeprefix("optional "): name for group, name in pairs if not group.startswith("override ") and name
    }


def _with_bases(group: str, name: str) -> Iterator[Values]:
    """Yield a file of a group after those that its defaults list names."""
    path = CONF / group / f"{name}.yaml"
    file = read_yaml(path)
    if group == "experiment" and not path.read_text().startswith(_GLOBAL):
        raise UserError(f"{path} must begin with the line '{_GLOBAL}'")
    entries = list(file.get("defaults", []))
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        if entry == "_self_":
            yield file
        elif isinstance(entry, str):
            yield from _with_bases(group, entry)
        elif not all(key.startswith("override /") for key in entry):
            raise UserError(f"{path}: defaults take NAME, 'override /GROUP: NAME' and _self_, got {entry}")


def _overridden(file: Values) -> dict[str, str]:
    """Return the choices that the defaults list of an experiment makes for other groups."""
    entries = [entry for entry in file.get("defaults", []) if isinstance(entry, dict)]
    return {key.removeprefix("override /"): name for entry in entries for key, name in entry.items()}


def _own_keys(file: Values) -> Values:
    return {key: value for key, value in file.items() if key not in ("defaults", "hydra")}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML as Hydra reads it: 1e-3 is a number, and a date is a string."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag != "tag:yaml.org,2002:timestamp"]
    for first, pairs in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9]+|[0-9]*\.[0-9]+|[0-9]+\.)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)
