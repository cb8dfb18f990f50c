"""Carry out a Hydra command: check all runs of -m before the first one starts, and print a mistake in one line.

With HYDRA_FULL_ERROR=1 the traceback comes before the line. Bugs always have a traceback.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, flag_override

from experiments.config.command_line import FAILED, FULL_ERROR, print_error
from experiments.config.compose import compose_runs, expand, parse
from experiments.config.errors import RunFailed, UserError, one_line, short
from experiments.config.hydra_errors import explained, raised_by_hydra, raised_by_hydra_calling, raised_by_plugin
from experiments.launching.rank_environment import read_rank_environment
from experiments.runs.before_start import check_outputs, distinct
from experiments.runs.run_folder import RunFolder, folder_of

_folders: list[RunFolder] = []  # of the runs of -m


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
        RunFailed: a run failed, or a launcher, which knows jobs and not runs, lost a job.
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
        raise _lost(failed.why) from None
    except BrokenPipeError:  # Hydra prints its help and configurations
        raise
    except Exception as error:
        if type(error).__module__.startswith("submitit."):
            raise _lost(f"submitit: {one_line(error)}") from error
        if raised_by_hydra(error):
            raise UserError(explained(error)) from error
        if plugin := raised_by_plugin(error):
            raise _lost(f"{plugin}: {one_line(error)}") from error
        if isinstance(error, OSError) and raised_by_hydra_calling(error):
            raise UserError(f"hydra.run.dir or hydra.sweep.dir cannot be used: {one_line(error)}") from error
        raise
    return 0


def _lost(why: str) -> RunFailed:
    """Return the failure of -m, with the runs that it has begun with and that are not done."""
    names = ", ".join(folder.path.name for folder in _folders if not folder.is_done())
    return RunFailed(f"{why}; not done: {names}" if names else why)


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


class Multirun(Callback):
    """Hydra calls this where -m begins; conf/train.yaml names it."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Check the runs of a grid; those that another sweeper chooses are checked as they come.

        Raises:
            Refused: a run could not start, or two are the same.
        """
        try:
            if read_rank_environment():
                raise UserError("-m starts one group of workers per run: call it without torchrun or srun")
            if config.hydra.runtime.choices["hydra/sweeper"] == "basic":
                _check_grid(config)
        except Exception as error:
            raise Refused(error) from None


def _check_grid(config: DictConfig) -> None:
    searched = [f"{key}={values}" for key, values in (config.hydra.sweeper.get("params") or {}).items()]
    jobs = expand([*searched, *config.hydra.overrides.task])
    _, configs = distinct(jobs, compose_runs(_numbered(jobs, config), name=config.hydra.job.config_name))
    from experiments.training.preflight import check_runs  # imports torch: most mistakes are reported before that

    check_runs(configs)
    check_outputs(configs)
    _folders[:] = map(folder_of, configs)


def _numbered(jobs: Iterable[list[str]], config: DictConfig) -> Iterator[list[str]]:
    """Yield each job, while ``${hydra:job.num}`` is its number."""
    known = deepcopy(config)
    for number, job in enumerate(jobs):
        with flag_override(known.hydra, ["struct", "readonly"], [False, False]):
            known.hydra.job.num, known.hydra.job.id = number, str(number)
        HydraConfig.instance().set_config(known)
        yield job


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
