"""Carry out runs of a sweep in a worker process."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from experiments.config.schema import TrainConfig
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import run_log
from experiments.sweeps.attempt import attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run that a process is to carry out.

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


def carry_out(job: Job) -> str | None:
    """Carry out a run in this process; return in one line why it failed, None if it did not.

    A signal that stops the run ends the process, with the exit code of ``execute``.
    """
    sys.argv = job.command
    if job.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(job.threads)  # of the ranks
        torch.set_num_threads(job.threads)
    return attempt(job.config, job.folder, _logged)


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
