"""Run a command of Hydra's, whose mistakes are one line in place of its usage or a traceback.

With HYDRA_FULL_ERROR=1 the traceback stands before the line. A fault of the program itself always has its own.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from experiments.config.command_line import FAILED, FULL_ERROR, print_error, shows_all
from experiments.config.errors import RunFailed, UserError
from experiments.config.hydra_errors import explained, raised_by_hydra
from experiments.config.overrides import parse

_SEE = "see python -m experiments.train --help"
_PLACES = ("You can check", "  - ")  # how submitit ends its message on a failed job
_told: list[BaseException] = []


class Refused(BaseException):
    """Ends a command of Hydra's at once; of an Exception it would make more words, or in a callback a warning.

    Attributes:
        error: why.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def run_by_hydra(run: Callable[[], Any], words: Sequence[str]) -> int:
    """Give the words of a command line to a function of ``@hydra.main``; return 1 if a job of -m failed.

    Raises:
        UserError: what Hydra has against the words.
        RunFailed: a run failed, or a launcher lost a job.
    """
    sys.argv[1:] = _ordered(words)
    _told.clear()
    try:
        with _raising():
            run()
    except Refused as refused:
        raise refused.error from refused.error.__cause__
    except Exception as error:
        if error in _told and not shows_all():
            return FAILED
        if _is_of_words(error):
            raise UserError(explained(error)) from error
        if type(error).__module__.startswith("submitit."):
            lines = [line for line in str(error).splitlines() if line.strip(" -") and not line.startswith(_PLACES)]
            raise RunFailed(f"submitit: {'; '.join(dict.fromkeys((lines[0], lines[-1])))}") from error
        raise
    return 0


@contextmanager
def job_of_hydra() -> Iterator[None]:
    """Have the error of a job told once: of -m here, where it is carried out; Hydra raises that of the first one alone.

    Raises:
        Refused: a single run has an error that is told in one line; Hydra would print the words beside it.
    """
    try:
        yield
    except Exception as error:
        in_one_line = isinstance(error, UserError | RunFailed)
        if HydraConfig.get().mode is not RunMode.MULTIRUN:
            if in_one_line:
                raise Refused(error) from error
            raise
        _told.append(error)
        if in_one_line:
            print_error(error)
        else:
            traceback.print_exception(error)
        raise


def _ordered(words: Sequence[str]) -> list[str]:
    """Return the options of a command line before its other words; they may stand in any order.

    Raises:
        UserError: no such option, or one that contradicts another.
    """
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    given = parser.parse_intermixed_args(list(words))
    both = [key for key in ("run", "multirun", "cfg", "info", "shell_completion") if getattr(given, key)]
    if len(both) > 1:
        names = " and ".join(f"--{key.replace('_', '-')}" for key in both)
        raise UserError(f"{names} exclude each other: leave one out; {_SEE}")
    for key in ("package", "resolve"):
        if getattr(given, key) and not given.cfg:
            raise UserError(f"--{key} is for --cfg: add --cfg job, or leave it out; {_SEE}")
    options = list(words)
    for word in given.overrides:
        options.remove(word)
    return [*options, *(str(word.input_line) for word in parse(given.overrides))]


def _refuse(message: str) -> NoReturn:
    raise UserError(f"{message.removeprefix('argument ')}; {_SEE}")


def _is_of_words(error: Exception) -> bool:
    """Return whether Hydra raised an error while it read words and files, before any job."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [str(frame.f_globals.get("__name__")).split(".")[0] for frame in frames]
    in_job = {"experiments", "__main__"} & set(packages[packages.index("hydra") :]) if "hydra" in packages else True
    return raised_by_hydra(error) and not in_job and "return_value" not in [frame.f_code.co_name for frame in frames]


@contextmanager
def _raising() -> Iterator[None]:
    """Have Hydra raise its errors, which it would print, and end the process."""
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        os.environ.pop(FULL_ERROR)
        if before is not None:
            os.environ[FULL_ERROR] = before
