"""Mistakes that Hydra and OmegaConf find, in one line: the key, what was given, what is allowed, and close names."""

import dataclasses
import re
import traceback
import typing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from experiments.config.conf_files import TOOLS
from experiments.config.errors import UserError, not_among, one_line, short, shown, suggestion
from experiments.config.schema import TrainConfig

_HINTS = ("To append", "object_type", "full_key", "reference_type", "See ")  # lines that help no user
_SCALARS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a word"}
_WORD = re.compile(r"(?:override |argument |parameters )'?([^\n]*?)'?(?: requires --multirun)?$", re.MULTILINE)


@contextmanager
def one_line_each() -> Iterator[None]:
    """Have what Hydra cannot compose raise UserError in this context."""
    try:
        yield
    except Exception as error:
        if not raised_by_hydra(error):
            raise
        raise UserError(explained(error)) from error


def raised_by_hydra(error: Exception) -> bool:
    """Return whether an error was raised in the code of Hydra or OmegaConf, which read the words of a user."""
    if isinstance(error, HydraException | OmegaConfBaseException):
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).split(".")[0] in ("hydra", "omegaconf", "antlr4")


def explained(error: Exception) -> str:
    """Return in one line what is wrong with the words or files that Hydra has read."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(error, OverrideParseException):
        return unreadable(str(error.override))
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, given = error.missing_cfg_file.rpartition("/")
        return not_among(group, error.options, given)
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.parent_node is not None:
        return _unknown_key(cause)
    if isinstance(cause, MissingMandatoryValue):
        return f"'{cause.full_key}' is missing: set it, {cause.full_key}=VALUE"
    if isinstance(cause, ConfigTypeError) and "support deletion" in str(cause):
        return cannot_remove(str(cause.full_key))
    if isinstance(cause, ValidationError) and not isinstance(cause, InterpolationResolutionError):
        key = str(cause.full_key).partition("[")[0]
        if (kind := kind_of(key)) is not Any:
            return _wrong_value(key, kind, cause.value)
    return _of_composition(error) or _first_lines(error, cause)


def unreadable(word: str) -> str:
    """Return what is said of a word that is no KEY=VALUE in Hydra's grammar."""
    if "=" not in word and not word.startswith("~"):
        return f"'{short(word)}' is not KEY=VALUE, for instance epochs=5 or sparsifier=topk"
    key, _, value = short(word).partition("=")
    return f"cannot read {short(word)!r}: put a value with spaces or special characters in quotes, \"{key}='{value}'\""


def cannot_remove(key: str) -> str:
    """Return what is said of ``~key`` for a setting of the schema."""
    return f"{key} cannot be removed, every run has it: set it to another value"


def unknown_key(name: str, parent: str, keys: Iterable[object]) -> str:
    """Return what is said of a key that is not one of ``parent``, a dotted key; empty for the whole configuration."""
    known = [str(key) for key in keys if key != "hydra"]
    allowed = f"which has {', '.join(known)}" if known else "which has none"
    return f"'{short(name)}' is not a key of {parent or 'the configuration'}, {allowed}{suggestion(name, known)}"


def _unknown_key(error: OmegaConfBaseException) -> str:
    node, parent = error.parent_node, str(error.full_key).rpartition(".")[0]
    keys = list(node) if OmegaConf.is_dict(node) else []
    said = unknown_key(str(error.key), parent, keys)
    if error.object_type is not dict or "did you mean" in said:
        return said
    if not keys and kind_of(parent) is Any:  # a part that has a name alone
        if error.key == "name":
            return f"{said}: it is a name alone, set {parent}=VALUE"
        return f"{said}: give name and settings together, '{parent}={{name: NAME, {error.key}: VALUE}}'"
    return f"{said}; to add it, +{parent}.{error.key}=VALUE"


def _wrong_value(key: str, kind: Any, value: Any) -> str:
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return f"{key} holds several settings ({', '.join(names)}), got {shown(value)}: set one, {key}.{names[0]}=VALUE"
    origin = typing.get_origin(kind)
    if origin is list and not isinstance(value, list):
        return f"{key} must be a list, got {shown(value)}: write '{key}=[...]'"
    if origin is dict:
        return f"{key} must be a mapping, got {shown(value)}: write '{key}={{NAME: VALUE}}'"
    kind = typing.get_args(kind)[0] if origin is list else kind
    return f"{key} must be {_SCALARS[kind]}, got {shown(value)}"


def kind_of(key: str) -> Any:
    """Return the type that the schema gives a setting, without ``| None``; Any in a mapping of settings."""
    kind: Any = TrainConfig
    for name in key.split("."):
        if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
            return Any
        kind = typing.get_type_hints(kind).get(name, Any)
        parts = [part for part in typing.get_args(kind) if part is not type(None)]
        kind = parts[0] if type(None) in typing.get_args(kind) else kind
    return kind


def _of_composition(error: Exception) -> str:
    """Return what Hydra has against a word, in this project's words; empty where its own are as good."""
    text = str(error)
    if not isinstance(error, ConfigCompositionException):
        return ""
    if text.startswith(("Ambiguous value", "Sweep parameters")) and (found := _WORD.search(text)):
        return f"'{short(found[1])}' names several values: run them all with -m, or choose one"
    if "No match in the defaults list" in text:
        group, _, given = text.partition("+")[2].partition("=")
        if group in TOOLS:
            return f"{group} is not a setting of a training, it {TOOLS[group].format(given)}"
    return ""


def _first_lines(error: Exception, cause: BaseException) -> str:
    lines = [line.strip() for each in dict.fromkeys((str(error), str(cause))) for line in each.splitlines()]
    kept = [line for line in lines if line.strip(" ^") and not line.startswith(_HINTS)]
    key = getattr(cause, "full_key", None)
    return (f"{key}: " if key else "") + ("; ".join(kept[:3]) or one_line(error))
