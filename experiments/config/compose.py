"""Compose checked configurations from a command line with Hydra, before anything is built or started."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from experiments.config import CONF
from experiments.config.checks import check_settings
from experiments.config.conf_files import choices_of
from experiments.config.errors import UserError, not_among, one_line
from experiments.config.hydra_errors import cannot_remove, one_line_each, unknown_key, unreadable
from experiments.config.keys import flat
from experiments.config.ranges import MOST_RUNS, check_num_runs
from experiments.config.schema import GROUPS, TrainConfig

NAME = "train"  # the primary configuration, conf/train.yaml
_KEYS = frozenset(field.name for field in dataclasses.fields(TrainConfig))
_LONGEST_KEY = 200  # longer names are no file names, which Hydra tries
_HOME = re.compile(r"^([^=]+)=(~(?:/[^'\"]*)?)$")  # a path with ~, which Hydra's grammar reads only in quotes

ConfigStore.instance().store(name="schema", node=TrainConfig)
OmegaConf.register_new_resolver(
    "if_given", lambda given, usual, value, otherwise: otherwise if given == usual else value, replace=True
)  # conf/train.yaml sets Hydra's own folders


def compose_run(words: Sequence[str], *, joined_world_size: int | None = None) -> TrainConfig:
    """Return the configuration that ``words`` describe, with its settings checked.

    Args:
        joined_world_size: the number of ranks, if torchrun or srun started this process as one of them.

    Raises:
        UserError: a word that cannot be read, a setting that does not exist or a value out of its range.
    """
    (config,) = compose_runs([words], joined_world_size=joined_world_size)
    return config


def compose_runs(
    jobs: Iterable[Sequence[str]], *, name: str = NAME, joined_world_size: int | None = None
) -> list[TrainConfig]:
    """Return the configurations of all jobs, from the primary configuration ``name``; see compose_run.

    Raises:
        UserError: for the first wrong one.
    """
    with hydra_of_conf():
        return [typed(composed(job, name), joined_world_size=joined_world_size) for job in jobs]


def composed(words: Sequence[str], name: str = NAME) -> DictConfig:
    """Return Hydra's composition of ``words``.

    That takes 0.1 s, and the runs of a study share their choices of groups: each of those is composed once, and plain
    values are set as Hydra sets them. Raises: UserError.
    """
    overrides = parse(words)
    if of_hydra := [override.input_line for override in overrides if override.is_hydra_override()]:
        raise UserError(f"'{of_hydra[0]}' sets Hydra, not a run: it is for experiments.train, leave it out")
    values = [override for override in overrides if _is_value(override)]
    others = [override for override in overrides if not _is_value(override)]
    with one_line_each():
        if not all(_is_plain(each) and (each in values or each.key_or_group in GROUPS) for each in overrides):
            return compose(name, [str(override.input_line) for override in overrides])
        search_path = GlobalHydra.instance().config_loader().get_search_path().get_path()
        lines = tuple(str(override.input_line) for override in others)
        config = deepcopy(_composition(tuple(place.path for place in search_path), name, lines))
        for override in values:
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    return config


def typed(composed: DictConfig, *, joined_world_size: int | None = None) -> TrainConfig:
    """Return a composition as dataclasses, checked without building parts or reading files.

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
    """Compose from conf/, or inside a Hydra command from its search path."""
    if GlobalHydra.instance().is_initialized():
        yield
        return
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def parse(words: Iterable[str]) -> list[Override]:
    """Return words parsed by Hydra's grammar. Raises: UserError: a word is not KEY=VALUE."""
    return [_parsed(word) for word in words]


def expand(words: Iterable[str]) -> list[list[str]]:
    """Return one list of words for each run of -m: all combinations of the given values.

    Raises:
        UserError: a word is not KEY=VALUE, or its values cannot be listed.
    """
    axes = [_values(override) for override in parse(words)]
    check_num_runs("-m", math.prod(map(len, axes)))
    return [list(job) for job in itertools.product(*axes)]


@lru_cache(maxsize=512)
def _composition(places: tuple[str, ...], name: str, choices: tuple[str, ...]) -> DictConfig:
    return compose(name, list(choices))


def _is_plain(override: Override) -> bool:
    """Return whether a word is KEY=VALUE or GROUP=CHOICE, whose place among other words does not matter."""
    return override.type == OverrideType.CHANGE and override.package is None and not override.is_sweep_override()


def _is_value(override: Override) -> bool:
    """Return whether a word sets a key of the schema, not a choice of a group."""
    key = override.key_or_group
    return key.split(".")[0] in _KEYS and (key not in GROUPS or isinstance(override.value(), dict))


def _check_keys(composed: DictConfig, kind: type, parent: str = "") -> None:
    """Refuse overrides that Hydra allows for unknown keys (``++densty=0.1``, which has no effect) and ``~lr``."""
    known, given = [field.name for field in dataclasses.fields(kind)], list(composed.keys())
    for name in given:
        if name not in known:
            raise UserError(unknown_key(str(name), parent, known))
        inner = composed._get_node(name)  # may be missing; not resolved
        if isinstance(inner, DictConfig) and dataclasses.is_dataclass(inner_kind := OmegaConf.get_type(inner)):
            assert isinstance(inner_kind, type)
            _check_keys(inner, inner_kind, f"{parent}.{name}".strip("."))
    lost = [name for name in known if name not in given]
    if lost and OmegaConf.get_type(composed) is kind:
        raise UserError(cannot_remove(f"{parent}.{lost[0]}".strip(".")))


@lru_cache(maxsize=4096)
def _parsed(word: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(_HOME.sub(r"\1='\2'", word))
    except (HydraException, ValueError, RecursionError):  # ValueError: a number with thousands of digits
        raise UserError(unreadable(word)) from None
    key = override.key_or_group
    if not 0 < len(key) <= _LONGEST_KEY:
        raise UserError(unreadable(word))
    if key in GROUPS and not (override.is_delete() or override.is_sweep_override()):
        given = override.value()
        if not isinstance(given, str | list | dict):  # Hydra would not name the group
            raise UserError(f"{not_among(key, choices_of(key), str(given))}; to leave it out, ~{key}")
    return override


def _values(override: Override) -> list[str]:
    """Return the words into which -m expands a word. Raises: UserError: none, too many, or they cannot be listed."""
    given, key = str(override.input_line), override.get_key_element()
    if not override.is_sweep_override():
        return [given]
    if GlobalHydra.instance().is_initialized():  # it finds the choices of glob(...)
        override.config_loader = GlobalHydra.instance().config_loader()
    try:
        words = [f"{key}={each}" for each in itertools.islice(override.sweep_string_iterator(), MOST_RUNS + 1)]
    except (HydraException, ValueError, TypeError, OverflowError) as error:
        raise UserError(f"'{given}': {one_line(error)}; list the values, {key}=A,B") from None
    if not words:
        raise UserError(f"'{given}' names no value: list the values, {key}=A,B")
    return words
