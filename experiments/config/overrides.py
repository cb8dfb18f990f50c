"""The words of a command line, in Hydra's grammar, and the lists of words that the words of -m stand for."""

import itertools
import math
import re
from collections.abc import Iterable
from functools import lru_cache

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from experiments.config.conf_files import choices_of
from experiments.config.descriptions import GROUPS
from experiments.config.errors import UserError, not_among, one_line
from experiments.config.hydra_errors import unreadable
from experiments.config.ranges import MOST_RUNS, check_num_runs

_LONGEST_KEY = 200  # Hydra looks for a file of that name
_HOME = re.compile(r"^([^=]+)=(~(?:/[^'\"]*)?)$")  # a path with ~, which Hydra's grammar reads only in quotes


def parse(words: Iterable[str]) -> list[Override]:
    """Return words as Hydra's grammar reads them. Raises: UserError: a word is not KEY=VALUE."""
    return [_parsed(word) for word in words]


def expand(words: Iterable[str]) -> list[list[str]]:
    """Return one list of words for each run of -m: all combinations of the given values.

    Raises:
        UserError: a word is not KEY=VALUE, or its values cannot be listed.
    """
    axes = [_values(override) for override in parse(words)]
    check_num_runs("-m", math.prod(map(len, axes)))
    return [list(job) for job in itertools.product(*axes)]


@lru_cache(maxsize=4096)
def _parsed(word: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(_HOME.sub(r"\1='\2'", word))
    except (HydraException, ValueError, RecursionError):  # ValueError: a number of thousands of digits
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
