"""From words on the command line to checked configurations, before anything is made or started."""

import itertools
import re
from collections.abc import Iterable

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.config.checks import typed
from experiments.config.errors import UserError, one_line_of_hydra, suggestion
from experiments.config.repository import CONF
from experiments.config.schema import TrainConfig

ConfigStore.instance().store(name="schema", node=TrainConfig)
OmegaConf.register_new_resolver(
    "at", lambda paper, small, *, _root_: small if _root_.scale == "small" else paper, replace=True
)  # in an experiment: the paper's value beside the laptop's


def compose_run(overrides: list[str], *, joined_world_size: int | None = None) -> TrainConfig:
    """Return the configuration that ``overrides`` describe, with every setting checked by itself.

    Raises:
        UserError: an override that does not exist or a value out of its range.
    """
    _check_words(overrides)
    try:
        composed = compose("train", overrides)
        take_whole_(composed, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_unknown_key(str(error), overrides) or one_line_of_hydra(error)) from None
    return typed(composed, joined_world_size=joined_world_size)


def compose_runs(jobs: Iterable[list[str]], *, joined_world_size: int | None = None) -> list[TrainConfig]:
    """Return the configurations of all jobs; see compose_run. Raises: UserError, for the first that is wrong."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return [compose_run(job, joined_world_size=joined_world_size) for job in jobs]


def take_whole_(composed: DictConfig, overrides: list[str]) -> None:
    """Let a model or a data set of the command line be its own file's, without an experiment's name and settings.

    Hydra by itself lets the experiment's values win, so that ``model=NAME`` would change nothing where it has a name.
    """
    keys = [override.key_or_group for override in _parsed(overrides)]
    if "experiment" not in keys:
        return
    for group in {"model", "dataset"} & set(keys):
        words = [word for word, key in zip(overrides, keys, strict=True) if key.split(".")[0] == group]
        composed[group] = compose("train", words)[group]


def expand(overrides: list[str], *, multirun: bool) -> list[list[str]]:
    """Return one list of overrides per run: the product of all choices under -m, the words themselves otherwise.

    Raises:
        UserError: a word is no override.
    """
    if not multirun:
        return [overrides]
    choices = [list(_choices(override)) for override in _parsed(overrides)]
    return [list(job) for job in itertools.product(*choices)]


def _choices(override: Override) -> Iterable[str]:
    if override.is_sweep_override():
        key = override.get_key_element()
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    return [str(override.input_line)]


def _parsed(overrides: list[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise UserError(one_line_of_hydra(error)) from None


def _check_words(overrides: list[str]) -> None:
    """Refuse what hydra would take silently or explain at length: added keys, choices that are not there."""
    for override in _parsed(overrides):
        key = override.key_or_group
        if override.is_add() or override.is_delete():
            raise UserError(f"'{override.input_line}': keys of the configuration cannot be added or deleted")
        if override.is_sweep_override():
            raise UserError(f"'{override.input_line}' names several values: run them all with -m, or choose one")
        group = CONF / key
        if "." not in key and group.is_dir() and isinstance(override.value(), str):
            known = sorted(path.stem for path in group.glob("*.yaml"))
            if override.value() not in known:
                given = str(override.value())
                raise UserError(f"{key} must be one of {', '.join(known)}, got '{given}'{suggestion(given, known)}")


def _unknown_key(message: str, overrides: list[str]) -> str | None:
    """Return what to say where ``message`` is about a key that does not exist: what stands there instead."""
    found = re.match(r"Could not override '([^']+)'", message)
    if not found:
        return None
    *parents, key = found[1].split(".")
    choices = [word for word in overrides if (CONF / word.split("=")[0]).is_dir()]
    node = OmegaConf.select(compose("train", choices), ".".join(parents)) if parents else compose("train", choices)
    if not OmegaConf.is_dict(node):
        return f"'{found[1]}' is not a key of the configuration"
    keys = [str(name) for name in node]
    where = ".".join(parents) or "the configuration"
    return f"'{key}' is not a key of {where}, which has {', '.join(keys)}{suggestion(key, keys)}"
