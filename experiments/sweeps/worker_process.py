"""A process that carries out runs of a sweep, as the sweep sees it; what it does is in worker.py."""

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from experiments.config.schema import TrainConfig
from experiments.launching.child_environment import child_environment
from experiments.launching.failures import describe_exit
from experiments.runs.run_folder import RunFolder
from experiments.runs.stop_signals import EXIT_SAVED, STOP_SIGNALS


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


@dataclass(slots=True)
class WorkerProcess:
    """A process that carries out one run after another.

    Attributes:
        jobs: The process reads them from here, one at a time.
        answers: The process writes here how each ended.
        output: What it prints outside of runs.
        folder: Of the run under way, None while it waits for one.
    """

    process: subprocess.Popen[bytes]
    jobs: IO[bytes]
    answers: IO[bytes]
    output: "tempfile._TemporaryFileWrapper[bytes]"
    folder: RunFolder | None = None

    @classmethod
    def start(cls) -> "WorkerProcess":
        """Start a process that waits for its first run. It is of no terminal, so that Ctrl-C does not reach it."""
        output = tempfile.NamedTemporaryFile()  # noqa: SIM115 - open until the process has ended
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.sweeps.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            bufsize=0,
            env=child_environment(),
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        return cls(process, process.stdin, process.stdout, output)

    def give(self, job: Job) -> None:
        """Have the process carry out a run; it must not have one."""
        self.folder = job.folder
        with suppress(BrokenPipeError):  # it died: ``read_answer`` returns that
            self.jobs.write(pickle.dumps(job))

    def read_answer(self) -> tuple[bool, str | None]:
        """Return whether the process still lives, and why its run failed, None where it is finished."""
        line = self.answers.readline()
        if line:
            return True, json.loads(line)
        self.process.wait()
        return False, self._why_it_ended()

    def is_stopped(self) -> bool:
        """Return whether a signal stopped the process, which has ended."""
        unhandled = {-number for number in STOP_SIGNALS}  # it was starting: there was nothing to save
        return self.process.returncode in {128 + signal.SIGTERM, EXIT_SAVED, *unhandled}

    def close(self) -> None:
        """Wait for the end of the process, which a waiting one comes to now."""
        self.jobs.close()
        self.process.wait()
        self.answers.close()
        self.output.close()

    def _why_it_ended(self) -> str:
        if self.is_stopped():
            return "stopped by a signal: the same command goes on"
        return describe_exit(self.process.returncode, Path(self.output.name))
