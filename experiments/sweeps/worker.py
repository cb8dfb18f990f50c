"""Carry out runs of a sweep in a worker process."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from experiments.config.schema import TrainConfig
from experiments.runs.atomic_files import DiskError
from experiments.runs.lock import FolderInUse
from experiments.runs.manifest import RUNS_AT_ONCE
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import run_log
from experiments.sweeps.attempt import attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run for a worker process.

    Attributes:
        config: The run, checked.
        folder: The run folder.
        command: What the user typed, for the manifest.
        threads: Threads of each process of the run; None keeps OMP_NUM_THREADS.
        at_once: How many runs the sweep carries out at once, for the manifest.
    """

    config: TrainConfig
    folder: RunFolder
    command: list[str]
    threads: int | None
    at_once: int


def carry_out(job: Job) -> str | FolderInUse | DiskError | None:
    """Carry out a run in this process; return the reason of a failure in one line, None after a success.

    A run that another process holds, or whose disk takes no more, returns the error that says so.

    A signal that stops the run ends the process, with the exit code of ``execute``.
    """
    sys.argv = job.command
    os.environ[RUNS_AT_ONCE] = str(job.at_once)
    if job.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(job.threads)  # for the ranks
        torch.set_num_threads(job.threads)
    try:
        return attempt(job.config, job.folder, _logged)
    except (FolderInUse, DiskError) as error:
        return error


@contextmanager
def _logged(config: TrainConfig, folder: RunFolder) -> Iterator[None]:
    """Redirect the output of the run and its libraries to a file of its folder."""
    path = run_log(folder)
    path.parent.mkdir(exist_ok=True)
    before = os.dup(1), os.dup(2)
    with path.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # the log may be on a full disk
                stream.flush()
        for number, original in enumerate(before, start=1):
            os.dup2(original, number)
            os.close(original)
