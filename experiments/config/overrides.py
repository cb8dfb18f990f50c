"""The words of a command line that set a run: GROUP=CHOICE and KEY=VALUE, in Hydra's grammar."""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, QuotedString
from hydra.errors import HydraException

from experiments.config.conf_files import choices_of
from experiments.config.errors import UserError, check_choice, one_line, short
from experiments.config.paths import CONF
from experiments.config.ranges import MOST_RUNS, check_num_runs

TOOLS = {  # groups of conf/ that are not settings of a training, and their use
    "network": "describes a link for simulated steps: python -m experiments.simulate --network {}",
    "paper": "lists the parts of a paper's study: python -m experiments.reproduce {}",
    "sweep": "lists the runs of a study: python -m experiments.sweep {}",
}
_HOME = re.compile(r"^([^=]+)=(~(?:/[^'\"]*)?)$")  # a path with ~, which Hydra's grammar reads only in quotes


def parse(words: Iterable[str]) -> list[Override]:
    """Return words as Hydra's grammar reads them. Raises: UserError: a word is not KEY=VALUE."""
    return [_parsed(word) for word in words]


@lru_cache(maxsize=4096)
def _parsed(word: str) -> Override:
    if "=" not in word and not word.startswith("~"):
        raise UserError(f"'{word}' is not KEY=VALUE, for instance epochs=5 or sparsifier=topk")
    try:
        return OverridesParser.create().parse_override(_HOME.sub(r"\1='\2'", word))
    except (HydraException, ValueError, RecursionError):  # ValueError: a number of thousands of digits
        key, _, value = short(word).partition("=")
        raise UserError(
            f"cannot read {short(word)!r}: put a value with spaces or special characters in quotes, \"{key}='{value}'\""
        ) from None


def is_of_hydra(word: str) -> bool:
    """Return whether a word is a setting of Hydra, such as hydra/launcher=submitit_slurm, and not of a run."""
    return word.lstrip("+~").startswith(("hydra.", "hydra/"))


def expand(words: list[str], *, multirun: bool) -> list[list[str]]:
    """Return one list of words per run: with -m all combinations of the given values, otherwise the words themselves.

    Raises:
        UserError: a word is not KEY=VALUE.
    """
    if not multirun:
        return [words]
    choices = [_choices(override) for override in parse(words)]
    check_num_runs("-m", math.prod(map(len, choices)))
    return [list(job) for job in itertools.product(*choices)]


def each_value(words: list[str]) -> list[list[str]]:
    """Return few lists of words in which each value of each word occurs, of an interval both ends.

    They are what can be checked of -m before its sweeper chooses the runs, as Optuna does.

    Raises:
        UserError: a word is not KEY=VALUE.
    """
    axes = [_ends(override) or _choices(override) for override in parse(words)]
    first = [axis[0] for axis in axes]
    return [first, *([*first[:at], word, *first[at + 1 :]] for at, axis in enumerate(axes) for word in axis[1:])]


def _ends(override: Override) -> list[str]:
    interval = override.value() if override.is_interval_sweep() else None
    key = override.get_key_element()
    return [f"{key}={interval.start}", f"{key}={interval.end}"] if isinstance(interval, IntervalSweep) else []


def _choices(override: Override) -> list[str]:
    """Return the words that a word of -m stands for. Raises: UserError: none, too many, or they cannot be listed."""
    given = str(override.input_line)
    if not override.is_sweep_override():
        return [given]
    key, value = override.get_key_element(), override.value()
    try:
        named = value.filter(choices_of(key)) if isinstance(value, Glob) else override.sweep_string_iterator()
        words = [f"{key}={each}" for each in itertools.islice(named, MOST_RUNS + 1)]
    except (HydraException, ValueError, TypeError, OverflowError) as error:
        raise UserError(f"'{given}': {one_line(error)}; list the values, {key}=A,B") from None
    if not words:
        raise UserError(f"'{given}' names no value: list the values, {key}=A,B")
    return words


def split(overrides: Sequence[Override]) -> tuple[dict[str, str], list[tuple[str, Any]]]:
    """Return the choices of groups and the values of settings.

    Raises:
        UserError: an added or deleted key, several values, no such choice, or a group that is not of a training.
    """
    chosen: dict[str, str] = {}
    values = []
    for override in overrides:
        key, given = override.key_or_group, override.input_line
        if override.is_add() or override.is_delete() or override.is_force_add():
            raise UserError(f"'{given}': keys of the configuration cannot be added or deleted")
        if override.is_sweep_override():
            raise UserError(f"'{given}' names several values: run them all with -m, or choose one")
        if override.package is not None:
            raise UserError(f"'{given}': a group has one place, leave out @{override.package}")
        value = _value(override)
        if key in TOOLS:
            raise UserError(f"{key} is not a setting of a training, it {TOOLS[key].format(value)}")
        if key in _groups():
            if value is not None or key != "experiment":
                check_choice(key, choices_of(key), str(plain(value)))
                chosen[key] = str(plain(value))
        else:
            values.append((key, plain(value)))
    return chosen, values


def _value(override: Override) -> Any:
    try:
        return override.value()
    except (HydraException, ValueError, TypeError) as error:
        raise UserError(f"cannot read '{override.input_line}': {one_line(error)}") from None


@cache
def _groups() -> frozenset[str]:
    return frozenset(path.name for path in CONF.iterdir() if path.is_dir())


def plain(value: Any) -> Any:
    """Return a value of Hydra's grammar as plain Python."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, dict):
        return {str(plain(key)): plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value
