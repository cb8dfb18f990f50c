"""From the words of a command line to checked configurations, before anything is built or started."""

from collections.abc import Iterable
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.config.checks import check_settings
from experiments.config.conf_files import Values, compose_layers
from experiments.config.errors import UserError, one_line
from experiments.config.overrides import parse, split
from experiments.config.schema import TrainConfig
from experiments.config.values import set_value_, to_dataclass

ConfigStore.instance().store(name="schema", node=TrainConfig)
OmegaConf.register_new_resolver(
    "at", lambda paper, small, *, _root_: small if _root_.scale == "small" else paper, replace=True
)  # in an experiment: ${at:PAPER,SMALL} chooses one of two values by the key scale


def compose_run(words: list[str], *, joined_world_size: int | None = None) -> TrainConfig:
    """Return the configuration that ``words`` describe, with its settings checked.

    Args:
        words: GROUP=CHOICE and KEY=VALUE.
        joined_world_size: the number of ranks, if torchrun or srun started this process as one of them.

    Raises:
        UserError: a word that cannot be read, a setting that does not exist or a value out of its range.
    """
    return typed(composed_values(words), joined_world_size=joined_world_size)


def compose_runs(jobs: Iterable[list[str]], *, joined_world_size: int | None = None) -> list[TrainConfig]:
    """Return the configurations of all jobs; see compose_run. Raises: UserError, for the first wrong one."""
    return [compose_run(job, joined_world_size=joined_world_size) for job in jobs]


def composed_values(words: list[str]) -> Values:
    """Return the settings that ``words`` describe as plain values, interpolations resolved. Raises: UserError."""
    chosen, given = split(parse(words))
    values = compose_layers(chosen)
    for key, value in given:
        set_value_(values, key, value)
    return resolved(values) if _interpolated(values) else values


def typed(values: Values, *, joined_world_size: int | None = None) -> TrainConfig:
    """Return plain values as dataclasses, checked without building parts or reading files.

    Raises:
        UserError: a key that does not exist, a value that is missing, of another type or out of its range.
    """
    config: TrainConfig = to_dataclass(values)
    check_settings(config, joined_world_size=joined_world_size)
    return config


def resolved(values: Values) -> Values:
    """Return values with their interpolations, such as ${at:PAPER,SMALL}, resolved. Raises: UserError."""
    try:
        plain = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(one_line(error)) from None
    assert isinstance(plain, dict)
    left = _interpolated(plain)  # it was written as \\${...}, and whoever reads the run's config.yaml would resolve it
    if left:
        raise UserError(f"{left} cannot have '${{' in its text: write $NAME without braces, or leave it out")
    return {str(key): value for key, value in plain.items()}


def _interpolated(value: Any, key: str = "") -> str | None:
    """Return the dotted key of the first text with an interpolation, None without any."""
    if isinstance(value, str):
        return key if "${" in value else None
    if isinstance(value, dict):
        inner = [(f"{key}.{name}".strip("."), each) for name, each in value.items()]
    else:
        inner = [(key, each) for each in value] if isinstance(value, list) else []
    found = (_interpolated(each, name) for name, each in inner)
    return next((each for each in found if each is not None), None)
