"""One attempt: start the command of a run as a user does, disturb it, and wait until all its processes have ended."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from experiments.config.child_environment import child_environment
from experiments.config.paths import ROOT
from tests.small_disks import MemoryDisk
from tests.soak.case import TIMEOUT_S, Fault

LIMIT_S = 240.0 + TIMEOUT_S  # on a busy machine; a run here takes seconds
_PAUSE_S = 0.5
_END_S = 20.0  # for processes that end with their parent, on a busy machine
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Become the parent of all processes below this one whose parents die. Raises: OSError: this is no Linux."""
    if ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1):
        raise OSError("this system has no subreapers")


@dataclass
class Ended:
    """How an attempt ended: of each command its exit code, None for one that did not end, and its standard error.

    Attributes:
        fired: the faults that came while a command ran.
        left: processes that remained.
    """

    codes: list[int | None] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    fired: list[Fault] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


class Attempt:
    """An attempt at a run whose folder is the only one in ``output``.

    Args:
        words: of Python's command line.
        folder: for the output of the commands.
        disk: on which the run's folder is, if it may fill.
    """

    def __init__(self, words: Sequence[str], output: Path, folder: Path, disk: MemoryDisk | None) -> None:
        self._words, self._output, self._folder, self._disk = words, output, folder, disk
        self._commands: list[subprocess.Popen[bytes]] = []

    def run(self, faults: Sequence[Fault]) -> Ended:
        """Give the command, carry the faults out, and wait for the end."""
        self._folder.mkdir(parents=True)
        self._start()
        ended = Ended(fired=[fault for fault in faults if self._is_due(fault) and self._strike(fault)])
        deadline = time.monotonic() + LIMIT_S
        for command in self._commands:
            with suppress(subprocess.TimeoutExpired):
                command.wait(max(0.0, deadline - time.monotonic()))
            ended.codes.append(command.returncode)
            command.kill()
        ended.left = _end_of_all()
        ended.errors = [path.read_text(errors="replace") for path in sorted(self._folder.glob("*.err"))]
        if self._disk and any(fault.kind == "full" for fault in ended.fired):
            self._disk.free()
        return ended

    def _start(self) -> None:
        name = self._folder / str(len(self._commands))
        with name.with_suffix(".out").open("w") as out, name.with_suffix(".err").open("w") as err:
            command = subprocess.Popen(
                [sys.executable, *self._words],
                env=child_environment(OMP_NUM_THREADS="1"),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._commands.append(command)

    def _is_due(self, fault: Fault) -> bool:
        """Wait for the moment of a fault; return False if the command has ended before."""
        command, end = self._commands[0], None
        while command.poll() is None:
            if end is None and fault.step <= self._num_steps():
                end = time.monotonic() + fault.delay_s
            if end is not None and time.monotonic() >= end:
                return True
            time.sleep(0.002)
        return False

    def _num_steps(self) -> int:
        with suppress(OSError):
            return sum(path.read_bytes().count(b"\n") for path in self._output.glob("*/steps.jsonl"))
        return 0

    def _strike(self, fault: Fault) -> bool:
        """Carry out a fault; return whether there was something to strike."""
        processes = [process for process in _descendants() if fault.kind != "freeze" or _is_rank(process)]
        if fault.kind == "full" and self._disk:
            self._disk.fill()
        elif fault.kind == "removed":
            for folder in self._output.iterdir():
                shutil.rmtree(folder, ignore_errors=True)
        elif fault.kind == "twice":
            self._start()
        elif processes and fault.kind in ("signal", "pause", "freeze"):
            with suppress(ProcessLookupError):
                pid = processes[int(fault.place[0] * len(processes))].pid
                os.kill(pid, fault.signal if fault.kind == "signal" else signal.SIGSTOP)
                if fault.kind == "pause":
                    time.sleep(_PAUSE_S)
                    os.kill(pid, signal.SIGCONT)
        else:
            return False
        return True


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _end_of_all() -> list[str]:
    """Wait some seconds for the end of all processes below this one; kill the others, and return which they were."""
    end = time.monotonic() + _END_S
    while (left := _descendants()) and time.monotonic() < end:
        psutil.wait_procs(left, timeout=0.1)  # collects those that ended
    while running := _descendants():
        for process in running:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(running, timeout=1)
    return [f"left behind: {process}" for process in left]


def _is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "LOCAL_RANK" in process.environ()
    return False
