"""Turn errors of Hydra and OmegaConf into one line: key, value, allowed values, and similar names."""

import dataclasses
import traceback
import typing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
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

from experiments.config.conf_files import no_choice, retired
from experiments.config.errors import UserError, one_line, short, shown, suggestion
from experiments.config.keys import kind_of

_HINTS = ("To append", "1. ", "2. ", "object_type", "full_key", "reference_type", "See ")  # lines that help no user
_PLUGINS = {  # Hydra's sweepers and launchers, and their packages
    **{name: f"hydra-{name}-sweeper" for name in ("optuna", "ax", "nevergrad")},
    **{name: f"hydra-{name}-launcher" for name in ("joblib", "ray", "rq")},
    **dict.fromkeys(("submitit_slurm", "submitit_local"), "hydra-submitit-launcher"),
}
_KINDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a word",
    list: "a list, [...]",
    dict: "a mapping, {NAME: VALUE}",
}


@contextmanager
def one_line_each() -> Iterator[None]:
    """In this context, turn Hydra's errors into UserError."""
    try:
        yield
    except Exception as error:
        if not raised_by_hydra(error):
            raise
        raise UserError(explained(error)) from error


def raised_by_hydra(error: Exception) -> bool:
    """Return whether an error was raised in the code of Hydra or OmegaConf."""
    is_own = isinstance(error, HydraException | OmegaConfBaseException)
    return is_own or _packages(error)[-1][0] in ("hydra", "omegaconf", "antlr4")


def raised_by_hydra_calling(error: Exception) -> bool:
    """Return whether Python raised an error in a call by Hydra, for instance to make a folder."""
    return [names[0] for names in _packages(error) if names[0] in ("hydra", "experiments")][-1] == "hydra"


def raised_by_plugin(error: Exception) -> str:
    """Return the Hydra plugin, such as a sweeper, whose code raised an error; empty if ours raised it."""
    own = [names for names in _packages(error) if names[0] in ("hydra_plugins", "experiments")]
    return own[-1][1] if own and own[-1][0] == "hydra_plugins" else ""


def _packages(error: Exception) -> list[list[str]]:
    """Return the module of each function that an error went through, the last one raised it, by its words."""
    return [str(frame.f_globals.get("__name__")).split(".") for frame, _ in traceback.walk_tb(error.__traceback__)]


def explained(error: Exception) -> str:
    """Return in one line what is wrong with the words or files that Hydra read."""
    both = (error, error.__cause__)  # under a debugger OmegaConf's errors have a cause that names no key
    cause = next((each for each in both if isinstance(each, OmegaConfBaseException)), error)
    key, bracket, _ = str(getattr(cause, "full_key", None) or "").partition("[")
    if isinstance(error, OverrideParseException):
        return unreadable(str(error.override))
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, given = error.missing_cfg_file.rpartition("/")
        package = f"; it comes with pip install {_PLUGINS[given]}" if given in _PLUGINS else ""
        return no_choice(group, error.options, given) + package
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.parent_node is not None:
        keys = list(cause.parent_node) if OmegaConf.is_dict(cause.parent_node) else []
        return unknown_key(str(cause.key), key.rpartition(".")[0], keys)
    if isinstance(cause, MissingMandatoryValue):
        return f"'{key}' is missing: set it, {key}=VALUE"
    if isinstance(cause, ConfigTypeError) and "support deletion" in str(cause):
        return cannot_remove(key)
    is_value = isinstance(cause, ValidationError) and not isinstance(cause, InterpolationResolutionError)
    if is_value and (what := _words_of(kind_of(key)[0], is_element=bool(bracket))):
        return f"{key} must be {what}, got {shown(getattr(cause, 'value', None))}"
    lines = [line.strip() for each in dict.fromkeys((str(error), str(cause))) for line in each.splitlines()]
    kept = [line for line in lines if line.strip(" ^") and not line.startswith(_HINTS)]
    return (f"{key}: " if key else "") + ("; ".join(kept[:3]) or one_line(error))


def unreadable(word: str) -> str:
    """Return the message for a word that is not KEY=VALUE in Hydra's grammar."""
    if "=" not in word and not word.startswith("~"):
        return f"'{short(word)}' is not KEY=VALUE, for instance epochs=5 or sparsifier=topk"
    key, _, value = short(word).partition("=")
    if "'" in value or '"' in value:  # Hydra's grammar and the shell each remove a pair of quotes
        return f"cannot read {short(word)!r}: a value with quotes in it needs quotes of the other kind around it"
    return f"cannot read {short(word)!r}: put a value with spaces or special characters in quotes, \"{key}='{value}'\""


def cannot_remove(key: str) -> str:
    """Return the message for ``~key`` with a key of the schema."""
    return f"{key} cannot be removed, every run has it: set it to another value"


def unknown_key(name: str, parent: str, keys: Iterable[object]) -> str:
    """Return the message for a key that ``parent`` lacks, a dotted key; empty for the whole configuration."""
    if not parent and name in (gone := retired("key")):
        return f"{name} was removed: use {gone[name]['use']}"
    known = [str(key) for key in keys if key != "hydra"]
    close = suggestion(name, known)
    said = f"'{short(name)}' is not a key of {parent or 'the configuration'}, which has {', '.join(known) or 'none'}"
    if close or not parent or kind_of(parent)[0] not in (Any, dict[str, Any]):
        return said + close
    if kind_of(parent)[0] is Any and not known:  # a part given by its name
        return f"{said}: set {parent}=VALUE, or name and settings, '{parent}={{name: NAME, {name}: VALUE}}'"
    return f"{said}; to add it, +{parent}.{name}=VALUE"


def _words_of(kind: Any, *, is_element: bool) -> str:
    """Return in words which values a type of the schema, or an element of its list, takes."""
    if dataclasses.is_dataclass(kind):
        return f"a mapping of {', '.join(field.name for field in dataclasses.fields(kind))}"
    kind = typing.get_args(kind)[0] if is_element and typing.get_args(kind) else kind
    return _KINDS.get(typing.get_origin(kind) or kind, "")
