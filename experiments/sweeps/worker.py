"""Carry out runs of a sweep in a process beside it.

``python -m experiments.sweeps.worker PARENT`` reads from its standard input which runs.
"""

import json
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from experiments.config.schema import TrainConfig
from experiments.launching.process_lifetime import die_with_parent
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import run_log
from experiments.sweeps.attempt import attempt
from experiments.sweeps.worker_process import Job


def main() -> None:
    """Carry out the runs that are read from stdin; answer each with a line of JSON, why it failed or null.

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


if __name__ == "__main__":
    main()
