"""A command line as Hydra reads it, and mistakes that it finds as one line in place of its usage or a traceback."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from experiments.config.errors import UserError, one_line_of_hydra

_FULL = "HYDRA_FULL_ERROR"  # with it Hydra raises its errors; without, it prints them and ends the process
_SEE = "see python -m experiments.train --help"

_PLACES = ("You can check", "  - ")  # how submitit ends its message on a failed job


@contextmanager
def hydra_errors() -> Iterator[None]:
    """Have what Hydra cannot compose raise UserError in this context."""
    before = os.environ.get(_FULL)
    os.environ[_FULL] = "1"
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"{one_line_of_hydra(error)}; {_SEE}") from None
    finally:
        os.environ.pop(_FULL)
        if before is not None:
            os.environ[_FULL] = before


@contextmanager
def lost_jobs(found: list[str]) -> Iterator[None]:
    """Add to ``found`` what submitit raises in this context for the first job without a result, in one line."""
    try:
        yield
    except RuntimeError as error:
        if not type(error).__module__.startswith("submitit."):
            raise
        lines = [line for line in str(error).splitlines() if line.strip(" -") and not line.startswith(_PLACES)]
        found.append(f"submitit: {'; '.join(dict.fromkeys((lines[0], lines[-1])))}")


def split_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of a command line, with their values, and its other words; they may stand in any order.

    Raises:
        UserError: no such option, or one that contradicts another.
    """
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    given = parser.parse_intermixed_args(list(words))
    alone = ("run", "multirun", "cfg", "info", "shell_completion")
    both = [key for key in alone if getattr(given, key)]
    if len(both) > 1:
        names = " and ".join(f"--{key.replace('_', '-')}" for key in both)
        raise UserError(f"{names} exclude each other: leave one out; {_SEE}")
    if given.package and not given.cfg:
        raise UserError(f"--package is for --cfg: add --cfg job, or leave it out; {_SEE}")
    if given.resolve and not given.cfg:
        raise UserError(f"--resolve is for --cfg: add --cfg job, or leave it out; {_SEE}")
    options = list(words)
    for word in given.overrides:
        options.remove(word)
    return options, given.overrides


def _refuse(message: str) -> NoReturn:
    raise UserError(f"{message.removeprefix('argument ')}; {_SEE}")
