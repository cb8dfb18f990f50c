"""Execute runs on this machine, several at once, each in its own process.

Processes are forked from a server that imported torch once (multiprocessing's "forkserver"), because the import takes
longer than a short run. Nothing else is shared, so a killed run does not affect others.
"""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType

import torch

from experiments.config.errors import UserError, one_line_with_type
from experiments.config.schema import TrainConfig
from experiments.config.stopping import STOP_SIGNALS, exit_code, handled, name_of, raise_stop
from experiments.launching.failures import RankFailure
from experiments.launching.rank_environment import TERMINAL
from experiments.reports.measures import in_words
from experiments.runs.before_start import check_outputs
from experiments.runs.files import writing
from experiments.runs.manifest import RUNS_AT_ONCE
from experiments.runs.records import last_row
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import State, failure_log, state_of
from experiments.sweeps.num_jobs import threads_per_process
from experiments.training.run import execute
from micro import NonFiniteGradient

_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload([__name__])


class LocalSweep:
    """Carry out runs, ``at_once`` at a time; print one line for each that ends.

    A stop signal is passed on to all runs, which save, and no run is started after it. A second Ctrl-C kills them. A
    run that another process has in use is skipped. No run is started after a failure with ``on_error`` stop, or on
    a disk that takes no more.
    """

    def __init__(self, runs: Mapping[RunFolder, TrainConfig], *, at_once: int, on_error: str = "continue") -> None:
        self._runs, self._waiting = runs, deque(runs.items())
        self._at_once, self._on_error = at_once, on_error
        self._processes: dict[Connection, tuple[RunFolder, BaseProcess]] = {}  # by what ends with the process
        self._num_failed = self._signal = 0

    def run(self) -> int:
        """Carry out the runs; return 0 if all are done, 1 if not, or the exit code of a stop signal."""
        with handled(self._stop):
            try:
                while self._start_more() or self._processes:
                    for answer in wait(list(self._processes)):
                        assert isinstance(answer, Connection)
                        self._record_end(answer, *self._processes.pop(answer))
            finally:
                self._pass_on(signal.SIGTERM)  # after an error of the sweep itself; else no process is left
        num_done = sum(state_of(folder) == State.DONE for folder in self._runs)
        num_left = max(0, len(self._runs) - num_done - self._num_failed)
        left = f", {num_left} left: run the same command to resume" if num_left else ""
        _print(f"{num_done} of {len(self._runs)} runs done, {self._num_failed} failed{left}")
        return exit_code(self._signal) if self._signal else int(num_done < len(self._runs))

    def _start_more(self) -> bool:
        """Start as many runs as may go on at once; return whether one was started."""
        before = len(self._processes)
        while self._waiting and len(self._processes) < self._at_once and not self._signal:
            folder, config = self._waiting.popleft()
            if folder.is_locked():
                _print_skipped(folder)
            elif state_of(folder) != State.DONE:
                self._start(folder, config)
        return len(self._processes) > before

    def _start(self, folder: RunFolder, config: TrainConfig) -> None:
        threads = threads_per_process(config, self._at_once)
        variables = {**os.environ, RUNS_AT_ONCE: str(self._at_once)}
        if threads is not None:
            variables["OMP_NUM_THREADS"] = str(threads)  # for its ranks
        if self._at_once == 1 and os.isatty(2):
            variables[TERMINAL] = os.ttyname(2)
        answer, sender = _forked.Pipe(duplex=False)
        process = _forked.Process(target=_carry_out, args=(config, folder, sender, variables, threads))
        process.start()
        sender.close()
        self._processes[answer] = folder, process
        if self._signal:  # received before the process was in the list
            self._pass_on(signal.SIGTERM)

    def _record_end(self, answer: Connection, folder: RunFolder, process: BaseProcess) -> None:
        """Print how a run ended, and count it if it failed."""
        name = folder.path.name
        try:
            why: str | None = answer.recv()
        except EOFError:
            process.join()
            if self._signal:
                _print(f"stopped: {name}")
                return
            why = _described(process.exitcode or 0)
        process.join()
        if why is None:
            _print(f"done: {name} {in_words(last_row(folder.epochs_path))}".rstrip())
        elif folder.is_locked():  # another process was first
            _print_skipped(folder)
        else:
            log = failure_log(folder)
            _print(f"failed: {name}: {why}" + (f"; see {log}" if log else ""))
            self._num_failed += 1
            if self._on_error == "stop" or not _can_be_written(self._runs[folder]):
                self._waiting.clear()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        is_second = number == self._signal == signal.SIGINT
        self._signal = number
        self._pass_on(signal.SIGKILL if is_second else signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM)

    def _pass_on(self, number: int) -> None:
        for _, process in self._processes.values():
            if process.pid and process.is_alive():
                os.kill(process.pid, number)


def _carry_out(
    config: TrainConfig, folder: RunFolder, answer: Connection, variables: Mapping[str, str], num_threads: int | None
) -> None:
    """Carry out a run in this process, its output in its log; send why it failed in one line, None after a success.

    Nothing is sent where a signal stops the run: the exit code says so. The variables are those of the sweep's
    environment: this process was forked from one that may have another.
    """
    os.setsid()  # a terminal's Ctrl-C reaches the sweep alone, which passes it on
    with handled(raise_stop):
        threading.Thread(target=_stop_with_parent, daemon=True).start()
        os.environ.update(variables)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        try:
            folder.make()
            with writing(folder.log_path), folder.log_path.open("ab", buffering=0) as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            execute(config, folder=folder)
        except Exception as error:
            is_expected = isinstance(error, UserError | RankFailure | NonFiniteGradient)
            why = str(error) if is_expected else one_line_with_type(error)
            answer.send(why)
            with suppress(OSError):  # a full disk takes no log
                if not is_expected:  # for instance out of memory: the other runs may need less
                    traceback.print_exc()
                print(f"error: {why}", file=sys.stderr)
        else:
            answer.send(None)


def _stop_with_parent() -> None:
    """Save and stop the run when the sweep's process has ended, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _described(code: int) -> str:
    """Return how a process ended that sent no answer."""
    if code in {exit_code(number) for number in STOP_SIGNALS} or -code in STOP_SIGNALS:
        return "stopped by a signal: run the same command to resume"
    return f"killed by {name_of(-code)}" if code < 0 else f"its process ended with exit code {code}"


def _can_be_written(config: TrainConfig) -> bool:
    try:
        check_outputs([config])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    return True


def _print_skipped(folder: RunFolder) -> None:
    _print(f"skipped: {folder.path.name} is in use by {folder.owner() or 'another process'}")


def _print(line: str) -> None:
    with suppress(OSError):  # a pipe that nobody reads any more ends no run
        print(line, flush=True)
