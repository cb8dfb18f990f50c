"""Carry out runs of a sweep in a process beside it.

``python -m experiments.sweeps.local_sweep_worker PARENT`` reads from its standard input which runs.
"""

import json
import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from experiments.config.errors import UserError, one_line_with_type
from experiments.config.schema import TrainConfig
from experiments.launching.failures import RankFailure
from experiments.launching.process_lifetime import die_with_parent
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import run_log
from experiments.training.runner import Watcher, execute
from micro import NonFiniteGradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process of a sweep is told.

    Attributes:
        config: The run, checked.
        folder: Where it leaves its records.
        command: What the user typed, for the manifest.
        threads: Of each process of the run; None leaves OMP_NUM_THREADS in force.
    """

    config: TrainConfig
    folder: RunFolder
    command: list[str]
    threads: int | None


def attempt(config: TrainConfig, folder: RunFolder, watcher: Watcher) -> str | None:
    """Run ``config`` to its end; return in one line why it failed, None if it did not.

    Raises:
        SystemExit: a signal stopped the run, which is saved.
    """
    try:
        execute(config, watcher, folder=folder)
    except RankFailure as error:
        return f"rank {error.rank} failed: {error.message}"
    except (UserError, NonFiniteGradient) as error:
        return str(error)
    except Exception as error:  # memory that ran out, say: the other runs may have enough
        traceback.print_exc()
        return one_line_with_type(error)
    return None


@contextmanager
def _logged(config: TrainConfig, folder: RunFolder) -> Iterator[None]:
    """Send what the run and its libraries print to a file of its folder."""
    path = run_log(folder)
    path.parent.mkdir(exist_ok=True)
    before = os.dup(1), os.dup(2)
    with path.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, original in enumerate(before, start=1):
            os.dup2(original, number)
            os.close(original)


def main() -> None:
    """Carry out the runs that come in on stdin; answer each with a line of JSON, why it failed or null.

    A signal that stops a run ends the process, with the exit code of ``execute``.
    """
    die_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    while True:
        try:
            job: Job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        sys.argv = job.command
        if job.threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(job.threads)  # of workers
            torch.set_num_threads(job.threads)
        print(json.dumps(attempt(job.config, job.folder, _logged)), file=answers, flush=True)


if __name__ == "__main__":
    main()
