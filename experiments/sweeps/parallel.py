"""Carry out several runs of a sweep at once, each in a process of its own."""

import select
import signal
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from experiments.config.schema import TrainConfig
from experiments.runs.run_folder import folder_of
from experiments.runs.stop_signals import EXIT_SAVED, STOP_SIGNALS
from experiments.sweeps.live_table import LiveTable
from experiments.sweeps.outcome import Outcome
from experiments.sweeps.parallelism import threads_per_process
from experiments.sweeps.worker_process import Job, WorkerProcess
from experiments.training.runner import num_steps

_POLL_S = 0.1


class ParallelSweep:
    """Keep ``at_once`` runs going in as many processes, so that each has threads, memory and signals of its own.

    A process takes the next run when one is done, because importing torch takes longer than many a run; one that died
    is replaced. A signal that asks this process to stop goes to all runs, and none is started after it. A second
    Ctrl-C kills them.
    """

    def __init__(self, configs: list[TrainConfig], table: LiveTable, *, at_once: int, on_error: str) -> None:
        self._configs = configs
        self._waiting = deque(configs)
        self._table = table
        self._at_once = at_once
        self._on_error = on_error
        self._workers: list[WorkerProcess] = []
        self._outcome = Outcome()
        self._signal = 0
        self._killing = False

    def run(self) -> Outcome:
        """Carry out the runs; return what became of them."""
        with self._signals_handled():
            while True:
                self._start_more()
                busy = [worker for worker in self._workers if worker.folder]
                if not busy:
                    break
                self._collect(busy)
                self._table.draw()
        self._outcome.count_left([folder_of(config) for config in self._configs])
        if self._signal:
            self._outcome.stopped = EXIT_SAVED if self._signal == signal.SIGUSR1 else 128 + self._signal
        return self._outcome

    def _start_more(self) -> None:
        while self._may_start():
            config = self._waiting.popleft()
            folder = folder_of(config)
            if folder.is_done():  # by another sweep, since this one began
                continue
            self._table.begin(folder.path.name, folder.path, total_steps=num_steps(config))
            threads = threads_per_process(config, self._at_once)
            self._free_worker().give(Job(config=config, folder=folder, command=sys.argv, threads=threads))
            if self._signal:  # received before the run was on the list
                self._pass_on()

    def _may_start(self) -> bool:
        given_up = self._outcome.failures and self._on_error == "stop"
        num_busy = sum(worker.folder is not None for worker in self._workers)
        return bool(self._waiting) and num_busy < self._at_once and not (self._signal or given_up)

    def _free_worker(self) -> WorkerProcess:
        free = next((worker for worker in self._workers if worker.folder is None), None)
        if free is None:
            free = WorkerProcess.start()
            self._workers.append(free)
        return free

    def _collect(self, busy: list[WorkerProcess]) -> None:
        """Wait a moment for answers of the processes, or for their ends."""
        ready, _, _ = select.select([worker.answers for worker in busy], [], [], _POLL_S)
        for worker in busy:
            if worker.answers in ready:
                self._settle(worker)

    def _settle(self, worker: WorkerProcess) -> None:
        """Record how a run ended."""
        folder, worker.folder = worker.folder, None
        assert folder is not None
        alive, why = worker.read_answer()
        if not alive:
            self._workers.remove(worker)
            worker.close()
        if why is None:
            self._table.done(folder.path.name)
        elif not alive and (self._killing or (self._signal and worker.is_stopped())):
            self._table.stopped(folder.path.name)
        else:
            self._table.failed(folder.path.name, why)
            self._outcome.add_failure(folder, why)

    @contextmanager
    def _signals_handled(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._record) for number in (signal.SIGINT, *STOP_SIGNALS)}
        try:
            yield
        finally:
            for worker in self._workers:
                if worker.folder:  # after an error of the sweep itself
                    worker.process.terminate()
                worker.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._killing = number == self._signal == signal.SIGINT
        self._signal = number
        self._pass_on()

    def _pass_on(self) -> None:
        """Have the runs save and stop; their processes are of no terminal, so Ctrl-C reaches them here alone."""
        number = signal.SIGUSR1 if self._signal == signal.SIGUSR1 else signal.SIGTERM
        for worker in self._workers:
            if worker.folder:
                worker.process.send_signal(signal.SIGKILL if self._killing else number)
