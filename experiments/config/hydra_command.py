"""Run a Hydra command, and print a user's mistake in one line instead of usage or a traceback.

With HYDRA_FULL_ERROR=1 the traceback comes before the line. Bugs always have a traceback.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from hydra.types import RunMode

from experiments.config.command_line import FAILED, FULL_ERROR, print_error
from experiments.config.compose import parse
from experiments.config.errors import RunFailed, UserError, one_line, short
from experiments.config.hydra_errors import explained, raised_by_hydra, raised_by_hydra_calling, raised_by_plugin


class Refused(BaseException):
    """Ends a Hydra command at once. Not an Exception, which Hydra would wrap, or in a callback turn into a warning."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Reported(RunFailed):
    """A job of -m failed, and the process of this number has printed why. Hydra raises the first job's error."""

    def __init__(self, why: str, pid: int) -> None:
        super().__init__(why, pid)
        self.why, self.pid = why, pid


def run_by_hydra(run: Callable[[], Any], words: Sequence[str]) -> int:
    """Give the words of a command line to a function of ``@hydra.main``; return 1 if a job of -m failed.

    Raises:
        UserError: what Hydra has against the words.
        RunFailed: a run failed, or a launcher lost a job.
    """
    sys.argv[1:] = _ordered(words)
    try:
        with env_override({FULL_ERROR: "1"}):  # makes Hydra raise its errors instead of printing them
            run()
    except Refused as refused:
        raise refused.error from refused.error.__cause__
    except Reported as failed:
        if failed.pid == os.getpid():
            return FAILED
        raise RunFailed(failed.why) from None
    except BrokenPipeError:  # Hydra prints its help and configurations
        raise
    except Exception as error:
        if type(error).__module__.startswith("submitit."):
            raise RunFailed(f"submitit: {one_line(error)}") from error
        if raised_by_hydra(error):
            raise UserError(explained(error)) from error
        if plugin := raised_by_plugin(error):
            raise RunFailed(f"{plugin}: {one_line(error)}") from error
        if isinstance(error, OSError) and raised_by_hydra_calling(error):
            raise UserError(f"hydra.run.dir or hydra.sweep.dir cannot be used: {one_line(error)}") from error
        raise
    return 0


@contextmanager
def job_of_hydra() -> Iterator[None]:
    """In a job of -m, print the error in its process; in a single run, raise it unchanged."""
    try:
        yield
    except Exception as error:
        if HydraConfig.get().mode is not RunMode.MULTIRUN:
            raise Refused(error) from error
        if isinstance(error, UserError | RunFailed):
            print_error(error)
        else:
            traceback.print_exception(error)
        raise Reported(one_line(error), os.getpid()) from None


def _ordered(words: Sequence[str]) -> list[str]:
    """Return a command line with its options last, so that ``--info`` takes no other word. Raises: UserError."""
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    parser.allow_abbrev = False  # otherwise --experiment=NAME means --experimental-rerun=NAME
    given = parser.parse_intermixed_args(list(words)).overrides
    options = list(words)
    for word in given:
        options.remove(word)
    return [*(str(override.input_line) for override in parse(given)), *options]


def _refuse(message: str) -> NoReturn:
    unknown = message.partition("unrecognized arguments: ")[2].split()
    if dashed := next((word for word in unknown if word.startswith("--") and "=" in word), ""):
        raise UserError(
            f"'{short(dashed)}' is not an option: settings have no dashes, {short(dashed.lstrip('-'))}; in the command "
            "of a W&B sweep they are ${args_no_hyphens}, not ${args}"
        )
    raise UserError(f"{message.removeprefix('argument ')}; see python -m experiments.train --help")
