"""The words of a command line, in Hydra's grammar, and the lists of words that the words of -m stand for."""

import itertools
import math
import re
from collections.abc import Iterable
from functools import lru_cache

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException

from experiments.config.conf_files import choices_of
from experiments.config.descriptions import GROUPS
from experiments.config.errors import UserError, not_among, one_line, shown
from experiments.config.hydra_errors import kind_of, unreadable
from experiments.config.ranges import MOST_RUNS, check_num_runs

_LONGEST_KEY = 200  # Hydra looks for a file of that name
_HOME = re.compile(r"^([^=]+)=(~(?:/[^'\"]*)?)$")  # a path with ~, which Hydra's grammar reads only in quotes


def parse(words: Iterable[str]) -> list[Override]:
    """Return words as Hydra's grammar reads them. Raises: UserError: a word is not KEY=VALUE."""
    return [_parsed(word) for word in words]


@lru_cache(maxsize=4096)
def _parsed(word: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(_HOME.sub(r"\1='\2'", word))
    except (HydraException, ValueError, RecursionError):  # ValueError: a number of thousands of digits
        raise UserError(unreadable(word)) from None
    if not 0 < len(override.key_or_group) <= _LONGEST_KEY:
        raise UserError(unreadable(word))
    if override.key_or_group in GROUPS and not override.is_delete() and not override.is_sweep_override():
        _check_choice(override)
    if not (override.is_delete() or override.is_sweep_override()):
        _check_boolean(override)
    return override


def _check_choice(override: Override) -> None:
    """Refuse what is neither the name of a choice nor settings. Hydra would say so without the group."""
    group, given = override.key_or_group, override.value()
    if not isinstance(given, str | list | dict):
        remedy = f"; to leave it out, ~{group}" if given is None else ""
        raise UserError(not_among(group, choices_of(group), str(given)) + remedy)


def _check_boolean(override: Override) -> None:
    """Refuse a number for true or false: OmegaConf takes any but 0 for true."""
    given = override.value()
    if type(given) is int and given not in (0, 1) and kind_of(override.key_or_group) is bool:
        raise UserError(f"{override.key_or_group} must be true or false, got {shown(given)}")


def expand(words: Iterable[str]) -> list[list[str]]:
    """Return one list of words for each run of -m: all combinations of the given values.

    Raises:
        UserError: a word is not KEY=VALUE, or its values cannot be listed.
    """
    axes = [_values(override) for override in parse(words)]
    check_num_runs("-m", math.prod(map(len, axes)))
    return [list(job) for job in itertools.product(*axes)]


def each_value(words: Iterable[str]) -> list[list[str]]:
    """Return few lists of words in which each value of each word occurs, of an interval both ends.

    They are what can be checked of -m before its sweeper chooses the runs, as Optuna does.

    Raises:
        UserError: as expand.
    """
    axes = [_ends(override) or _values(override) for override in parse(words)]
    first = [axis[0] for axis in axes]
    return [first, *([*first[:at], word, *first[at + 1 :]] for at, axis in enumerate(axes) for word in axis[1:])]


def _ends(override: Override) -> list[str]:
    interval = override.value() if override.is_interval_sweep() else None
    key = override.get_key_element()
    return [f"{key}={interval.start}", f"{key}={interval.end}"] if isinstance(interval, IntervalSweep) else []


def _values(override: Override) -> list[str]:
    """Return the words that a word of -m stands for. Raises: UserError: none, too many, or they cannot be listed."""
    given, key = str(override.input_line), override.get_key_element()
    if not override.is_sweep_override():
        return [given]
    if GlobalHydra.instance().is_initialized():  # which finds the choices of glob(...)
        override.config_loader = GlobalHydra.instance().config_loader()
    try:
        words = [f"{key}={each}" for each in itertools.islice(override.sweep_string_iterator(), MOST_RUNS + 1)]
    except (HydraException, ValueError, TypeError, OverflowError) as error:
        raise UserError(f"'{given}': {one_line(error)}; list the values, {key}=A,B") from None
    if not words:
        raise UserError(f"'{given}' names no value: list the values, {key}=A,B")
    return words
