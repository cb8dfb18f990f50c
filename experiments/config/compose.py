"""From the words of a command line to checked configurations, by Hydra, before anything is built or started."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from experiments.config.checks import check_settings
from experiments.config.descriptions import GROUPS
from experiments.config.errors import UserError
from experiments.config.hydra_errors import cannot_remove, one_line_each, unknown_key
from experiments.config.overrides import parse
from experiments.config.paths import CONF
from experiments.config.schema import TrainConfig, flat

NAME = "train"  # of the primary configuration, conf/train.yaml
_KEYS = frozenset(field.name for field in dataclasses.fields(TrainConfig))

ConfigStore.instance().store(name="schema", node=TrainConfig)
OmegaConf.register_new_resolver(
    "at", lambda paper, small, *, _root_: small if _root_.scale == "small" else paper, replace=True
)  # in a recipe: ${at:PAPER,SMALL} chooses one of two values by the key scale
OmegaConf.register_new_resolver(
    "if_given", lambda given, usual, value, otherwise: otherwise if given == usual else value, replace=True
)  # in conf/train.yaml: where Hydra has a folder of its own


def compose_run(words: Sequence[str], *, joined_world_size: int | None = None) -> TrainConfig:
    """Return the configuration that ``words`` describe, with its settings checked.

    Args:
        words: as Hydra reads them.
        joined_world_size: the number of ranks, if torchrun or srun started this process as one of them.

    Raises:
        UserError: a word that cannot be read, a setting that does not exist or a value out of its range.
    """
    (config,) = compose_runs([words], joined_world_size=joined_world_size)
    return config


def compose_runs(
    jobs: Iterable[Sequence[str]], *, name: str = NAME, joined_world_size: int | None = None
) -> list[TrainConfig]:
    """Return the configurations of all jobs; see compose_run. Raises: UserError, for the first wrong one.

    Args:
        name: of the primary configuration.
    """
    with hydra_of_conf():
        return [typed(composed(job, name), joined_world_size=joined_world_size) for job in jobs]


def composed(words: Sequence[str], name: str = NAME) -> DictConfig:
    """Return what Hydra composes of ``words``.

    That takes 0.1 s, and the runs of a study share their choices of groups: each of those is composed once, and plain
    values are set as Hydra sets them. Raises: UserError.
    """
    overrides = parse(words)
    if of_hydra := [override.input_line for override in overrides if override.is_hydra_override()]:
        raise UserError(f"'{of_hydra[0]}' sets Hydra, not a run: it is for experiments.train, leave it out")
    choices = [override for override in overrides if override.key_or_group in GROUPS and not _is_value(override)]
    values = [override for override in overrides if _is_value(override)]
    with one_line_each():
        if not all(map(_is_plain, overrides)) or len(choices) + len(values) < len(overrides):
            return compose(name, [str(override.input_line) for override in overrides])
        lines = tuple(str(override.input_line) for override in choices)
        search_path = GlobalHydra.instance().config_loader().get_search_path().get_path()
        config = deepcopy(_composition(tuple(each.path for each in search_path), name, lines))
        for override in values:
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    return config


def typed(composed: DictConfig, *, joined_world_size: int | None = None) -> TrainConfig:
    """Return what was composed as dataclasses, checked without building parts or reading files.

    Raises:
        UserError: a key that does not exist or was removed, a value that is missing, of another type or out of range.
    """
    _check_keys(composed, TrainConfig)
    with one_line_each():
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), composed))
    assert isinstance(config, TrainConfig)
    if "${" in str(config):  # written as \${...}
        key = next(key for key, value in flat(dataclasses.asdict(config)).items() if "${" in str(value))
        raise UserError(f"{key} cannot have '${{' in its text, which config.yaml would resolve: leave it out")
    check_settings(config, joined_world_size=joined_world_size)
    return config


@contextmanager
def hydra_of_conf() -> Iterator[None]:
    """Compose from conf/, or, in a command of Hydra's, from where that command composes."""
    if GlobalHydra.instance().is_initialized():
        yield
        return
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@lru_cache(maxsize=512)
def _composition(places: tuple[str, ...], name: str, choices: tuple[str, ...]) -> DictConfig:
    return compose(name, list(choices))


def _is_plain(override: Override) -> bool:
    """Return whether a word is KEY=VALUE or GROUP=CHOICE, with nothing of Hydra's other forms."""
    return override.type == OverrideType.CHANGE and override.package is None and not override.is_sweep_override()


def _is_value(override: Override) -> bool:
    """Return whether a word sets a key of the schema, and chooses no file of a group."""
    key = override.key_or_group
    return key.split(".")[0] in _KEYS and (key not in GROUPS or isinstance(override.value(), dict))


def _check_keys(composed: DictConfig, kind: type, parent: str = "") -> None:
    """Refuse what Hydra lets a user do to keys of the schema: ``++densty=0.1``, which would be lost, and ``~lr``."""
    known, given = [field.name for field in dataclasses.fields(kind)], list(composed.keys())
    for name in given:
        if name not in known:
            raise UserError(unknown_key(str(name), parent, known))
        inner = composed._get_node(name)  # neither resolved nor required
        if isinstance(inner, DictConfig) and dataclasses.is_dataclass(inner_kind := OmegaConf.get_type(inner)):
            assert isinstance(inner_kind, type)
            _check_keys(inner, inner_kind, f"{parent}.{name}".strip("."))
    lost = [name for name in known if name not in given]
    if lost and OmegaConf.get_type(composed) is kind:
        raise UserError(cannot_remove(f"{parent}.{lost[0]}".strip(".")))
