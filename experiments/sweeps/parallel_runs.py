"""Carry out several runs of a sweep at once, each in its own process."""

import itertools
import signal
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from experiments.config.schema import TrainConfig
from experiments.config.stopping import STOP_SIGNALS, exit_code, handled
from experiments.launching.worker_process import WorkerFailure, WorkerProcess
from experiments.runs.atomic_files import DiskError
from experiments.runs.lock import FolderInUse
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.status import State, state_of
from experiments.sweeps.held_runs import HeldRuns
from experiments.sweeps.live_table import LiveTable
from experiments.sweeps.num_jobs import threads_per_process
from experiments.sweeps.outcome import Outcome
from experiments.sweeps.worker import Job, carry_out
from experiments.training.runner import num_steps

_POLL_S = 0.1


@dataclass(slots=True)
class _Slot:
    """A worker process that carries out one run after another.

    Attributes:
        config: Of the current run, None if there is none.
    """

    worker: WorkerProcess
    config: TrainConfig | None = None

    @property
    def folder(self) -> RunFolder | None:
        """The folder of the current run."""
        return folder_of(self.config) if self.config else None


class ParallelSweep:
    """Carry out ``at_once`` runs at a time, each in a process with its own threads, memory and signals.

    A process carries out many runs, because importing torch may take longer than a run. A process that died is
    replaced. A stop signal to this process is forwarded to all runs, and no run is started after it. A second Ctrl-C
    kills the runs. A run that another process holds is left for the end, and then waited for.
    """

    def __init__(self, configs: list[TrainConfig], table: LiveTable, *, at_once: int, on_error: str) -> None:
        self._configs = configs
        self._waiting = deque(configs)
        self._held = HeldRuns(table.say)
        self._table = table
        self._at_once = at_once
        self._on_error = on_error
        self._slots: list[_Slot] = []
        self._serial = itertools.count()
        self._outcome = Outcome()
        self._signal = 0
        self._killing = False

    def run(self) -> Outcome:
        """Carry out the runs; return the outcome."""
        with TemporaryDirectory(prefix="micro-sweep-") as logs, self._signals_handled():
            self._logs = Path(logs)
            while True:
                self._start_more()
                busy = [slot for slot in self._slots if slot.config]
                if not busy and not self._may_wait():
                    break
                self._collect(busy)
                self._table.draw()
        self._outcome.count_left([folder_of(config) for config in self._configs])
        if self._signal:
            self._outcome.stopped = exit_code(self._signal)
        return self._outcome

    def _start_more(self) -> None:
        self._waiting.extend(self._held.take_ended())
        while self._may_start():
            config = self._waiting.popleft()
            folder = folder_of(config)
            if state_of(folder) == State.DONE:
                self._outcome.num_elsewhere += 1
                self._table.done_elsewhere(folder.path.name)
                continue
            if folder.is_locked():  # no process need be started to find out
                self._held.add(config, str(folder.owner() or "another process"))
                continue
            self._table.begin(folder.path.name, folder.path, total_steps=num_steps(config))
            threads = threads_per_process(config, self._at_once)
            slot = self._free_slot()
            slot.config = config
            job = Job(config=config, folder=folder, command=sys.argv, threads=threads, at_once=self._at_once)
            slot.worker.send(carry_out, job)
            if self._signal:  # received before the slot had a folder
                self._forward_signal()

    def _may_start(self) -> bool:
        num_busy = sum(slot.config is not None for slot in self._slots)
        return bool(self._waiting) and num_busy < self._at_once and not self._is_ending()

    def _may_wait(self) -> bool:
        """Return whether runs are left that other processes hold, and say so."""
        if not self._held or self._is_ending():
            return False
        self._held.announce()
        return True

    def _is_ending(self) -> bool:
        return bool(
            self._signal or self._outcome.has_disk_error or (self._outcome.failures and self._on_error == "stop")
        )

    def _free_slot(self) -> _Slot:
        free = next((slot for slot in self._slots if slot.config is None), None)
        if free is None:
            log = self._logs / f"worker{next(self._serial)}.log"
            free = _Slot(WorkerProcess(log, at_parent_death=signal.SIGTERM))  # at SIGTERM a run saves its state
            self._slots.append(free)
        return free

    def _collect(self, busy: list[_Slot]) -> None:
        """Wait at most ``_POLL_S`` until processes answer or end, and record the results."""
        ready = wait([slot.worker.connection for slot in busy], _POLL_S)
        for slot in busy:
            if slot.worker.connection in ready:
                self._record_result(slot)

    def _record_result(self, slot: _Slot) -> None:
        """Record how a run ended."""
        config, slot.config = slot.config, None
        assert config is not None
        folder = folder_of(config)
        try:
            why = slot.worker.receive()
        except WorkerFailure as failure:
            self._slots.remove(slot)
            slot.worker.close()
            is_stopped = _is_stopped(failure.exit_code)
            if self._killing or (self._signal and is_stopped):
                self._table.stopped(folder.path.name)
                return
            why = "stopped by a signal: run the same command to resume" if is_stopped else str(failure)
        if isinstance(why, FolderInUse):
            self._table.put_back(folder.path.name)
            self._held.add(config, why.holder)
        elif why is None:
            self._table.done(folder.path.name)
        elif isinstance(why, DiskError) and self._outcome.has_disk_error:
            self._table.stopped(folder.path.name)  # for the reason that the first such run gave
        else:
            self._outcome.has_disk_error |= isinstance(why, DiskError)
            why = str(why)
            self._table.failed(folder.path.name, why)
            self._outcome.add_failure(folder, why)

    @contextmanager
    def _signals_handled(self) -> Iterator[None]:
        with handled(self._record):
            try:
                yield
            finally:
                for slot in self._slots:
                    if slot.config:  # an error of the sweep itself interrupted this run
                        slot.worker.process.terminate()
                    slot.worker.close()

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._killing = number == self._signal == signal.SIGINT
        self._signal = number
        self._forward_signal()

    def _forward_signal(self) -> None:
        """Make the runs save and stop; their processes have no terminal, so Ctrl-C reaches only this process."""
        number = signal.SIGUSR1 if self._signal == signal.SIGUSR1 else signal.SIGTERM
        for slot in self._slots:
            if slot.config:
                slot.worker.process.send_signal(signal.SIGKILL if self._killing else number)


def _is_stopped(code: int | None) -> bool:
    """Return whether a process ended because of a stop signal."""
    unhandled = {-number for number in STOP_SIGNALS}  # no handler was set yet: there was nothing to save
    return code in {*map(exit_code, STOP_SIGNALS), *unhandled}
