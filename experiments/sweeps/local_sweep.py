"""Carry out a study: the runs that are not finished, one after another or several at once."""

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from rich.console import Console

from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.launching.child_environment import child_environment, num_cores
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import log_of
from experiments.runs.stop_signals import EXIT_SAVED, STOP_SIGNALS, stop_signals
from experiments.sweeps.live_table import Board
from experiments.sweeps.local_sweep_worker import Job, attempt
from experiments.tracking.progress import SweepProgress, print_plain
from experiments.training.devices import choose_device
from experiments.training.runner import folder_of, label, num_steps

ON_ERROR = ("continue", "stop")
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class FailedRun:
    """A run that did not end well: its name, why in one line, and the file that tells more, if there is one."""

    run: str
    why: str
    log: Path | None


@dataclass(slots=True)
class Outcome:
    """What a sweep came to.

    Attributes:
        failures: In the order in which they happened.
        num_left: Runs that were not started, after a failure or a signal.
        stopped: Exit code of the signal that stopped the sweep, None without one.
    """

    failures: list[FailedRun] = field(default_factory=list)
    num_left: int = 0
    stopped: int | None = None

    @property
    def exit_code(self) -> int:
        """0 if all runs are finished, 1 if one failed, or the code of the signal that stopped the sweep."""
        if self.stopped is not None:
            return self.stopped
        return 1 if self.failures or self.num_left else 0


def run_all(configs: list[TrainConfig], console: Console, *, jobs: str = "auto", on_error: str = "continue") -> Outcome:
    """Run what is not finished.

    Args:
        configs: The runs of the study, each with a folder of its own.
        jobs: How many at once, see ``num_at_once``.
        on_error: continue, or stop: after a failure none is started, and those under way go on to their end.

    Raises:
        UserError: ``jobs`` is out of its range.
    """
    waiting = [config for config in configs if not folder_of(config).is_done()]
    at_once = num_at_once(waiting, jobs)
    if at_once == 1:
        return _one_by_one(configs, console, on_error)
    with Board(console, total=len(configs), done=len(configs) - len(waiting), num_at_once=at_once) as board:
        return _SideBySide(waiting, board, at_once=at_once, on_error=on_error).run()


def num_at_once(configs: list[TrainConfig], asked: str) -> int:
    """Return how many runs go on at the same time.

    Args:
        asked: A number, or auto: as many as the cores carry, counting each worker's process (simulated workers are one
            process) with cluster.num_threads or OMP_NUM_THREADS threads, 1 where neither is set; one on a GPU, and one
            across nodes.

    Raises:
        UserError: no such number, or several runs of several nodes, which would not meet.
    """
    check_jobs(asked)
    several_nodes = any(config.cluster.nnodes > 1 for config in configs)
    if asked != "auto":
        if several_nodes and int(asked) > 1:
            raise UserError(f"jobs={asked}: runs of several nodes meet one after another, use jobs=1")
        return max(1, min(int(asked), len(configs)))
    if several_nodes or any(choose_device(config).type != "cpu" for config in configs):
        return 1
    threads = _asked_threads(os.environ)
    wide = (num_processes(config) * (config.cluster.num_threads or threads) for config in configs)
    return max(1, min(num_cores() // max(wide, default=1), len(configs)))


def check_jobs(asked: str) -> None:
    """Refuse what is neither auto nor a number of runs. Raises: UserError."""
    if asked != "auto" and not (asked.isdecimal() and int(asked) >= 1):
        raise UserError(f"jobs must be auto or a whole number of at least 1, got '{asked}'")


def num_processes(config: TrainConfig) -> int:
    """Return how many processes of a run work on this machine."""
    return 1 if config.cluster.simulated else config.cluster.nproc_per_node


def _asked_threads(environ: Mapping[str, str]) -> int:
    given = environ.get("OMP_NUM_THREADS", "")
    return max(1, int(given)) if given.isdecimal() else 1


def _one_by_one(configs: list[TrainConfig], console: Console, on_error: str) -> Outcome:
    progress, outcome = SweepProgress(len(configs), console), Outcome()
    todo = deque(configs)
    with saving_at_interrupt() as interrupted:
        while todo:
            config = todo.popleft()
            folder = folder_of(config)
            if folder.is_done():
                progress.skip()
                continue
            try:
                why = attempt(
                    config, folder, lambda c, f: progress.watch(f.path, total_steps=num_steps(c), label=label(c))
                )
            except (SystemExit, KeyboardInterrupt) as stop:
                outcome.stopped = _exit_code(stop, interrupted())
                break
            if why:
                print_plain(console, f"failed: {folder.path.name}: {why}")
                outcome.failures.append(FailedRun(folder.path.name, why, log_of(folder)))
            if stop_signals.number:  # it came when the last step was done
                outcome.stopped = 128 + stop_signals.number if stop_signals.number == signal.SIGTERM else EXIT_SAVED
                break
            if why and on_error == "stop":
                break
    outcome.num_left = _num_left(configs, outcome)
    return outcome


def _num_left(configs: list[TrainConfig], outcome: Outcome) -> int:
    failed = {failure.run for failure in outcome.failures}
    return sum(folder.path.name not in failed and not folder.is_done() for folder in map(folder_of, configs))


def _exit_code(stop: BaseException, interrupted: bool) -> int:
    if interrupted or isinstance(stop, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return int(getattr(stop, "code", 1) or 1)


@contextmanager
def saving_at_interrupt() -> Iterator[Callable[[], bool]]:
    """Have Ctrl-C save a run as SIGTERM does; yields what tells whether it came."""
    came: list[int] = []

    def save(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # nothing to save at this moment
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGINT, save)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(slots=True)
class _Slot:
    """A process that carries out one run after another.

    Attributes:
        runs: Where it reads which ones.
        answers: Where it says how each ended.
        words: What it says beside that, outside of runs.
        folder: Of the run under way, None while it waits for one.
    """

    process: subprocess.Popen[bytes]
    runs: IO[bytes]
    answers: IO[bytes]
    words: IO[bytes]
    folder: RunFolder | None = None

    def give(self, job: Job) -> None:
        self.folder = job.folder
        with suppress(BrokenPipeError):  # it died: whoever waits for its answer finds out
            self.runs.write(pickle.dumps(job))

    def close(self) -> None:
        self.runs.close()  # ends a process that waits
        self.process.wait()
        self.answers.close()
        self.words.close()

    def is_stopped(self) -> bool:
        """Return whether the process ended by a signal that asks it to, and not by itself."""
        unheeded = {-number for number in STOP_SIGNALS}  # it was starting: there was nothing to save
        return self.process.returncode in {128 + signal.SIGTERM, EXIT_SAVED, *unheeded}

    def why(self) -> str:
        """Return why the ended process failed."""
        code = self.process.returncode
        if self.is_stopped():
            return "stopped by a signal: the same command goes on"
        if code < 0:
            hint = ", as the kernel does when memory runs out" if -code == signal.SIGKILL else ""
            return f"killed by {signal.Signals(-code).name}{hint}"
        self.words.seek(0)
        lines = [line for line in self.words.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {code}"


class _SideBySide:
    """Keep ``at_once`` runs going in as many processes, so that each has threads, memory and signals of its own.

    A process takes the next run when one is done, because importing torch takes longer than many a run; one that died
    is replaced. A signal that asks this process to stop goes to all runs, and none is started after it. A second
    Ctrl-C kills them.
    """

    def __init__(self, configs: list[TrainConfig], board: Board, *, at_once: int, on_error: str) -> None:
        self._configs = configs
        self._waiting = deque(configs)
        self._board = board
        self._at_once = at_once
        self._on_error = on_error
        self._slots: list[_Slot] = []
        self._outcome = Outcome()
        self._signal = 0
        self._killing = False

    def run(self) -> Outcome:
        with self._signals():
            while True:
                self._start_more()
                busy = [slot for slot in self._slots if slot.folder]
                if not busy:
                    break
                self._collect(busy)
                self._board.draw()
        self._outcome.num_left = _num_left(self._configs, self._outcome)
        if self._signal:
            self._outcome.stopped = EXIT_SAVED if self._signal == signal.SIGUSR1 else 128 + self._signal
        return self._outcome

    def _start_more(self) -> None:
        while self._may_start():
            config = self._waiting.popleft()
            folder = folder_of(config)
            if folder.is_done():  # by another sweep, since this one began
                continue
            self._board.begin(folder.path.name, folder.path, total_steps=num_steps(config))
            self._free_slot().give(_job(config, folder, at_once=self._at_once))
            if self._signal:  # it came before the run was on the list
                self._pass_on()

    def _may_start(self) -> bool:
        given_up = self._outcome.failures and self._on_error == "stop"
        num_busy = sum(slot.folder is not None for slot in self._slots)
        return bool(self._waiting) and num_busy < self._at_once and not (self._signal or given_up)

    def _free_slot(self) -> _Slot:
        free = next((slot for slot in self._slots if slot.folder is None), None)
        if free is None:
            free = _start()
            self._slots.append(free)
        return free

    def _collect(self, busy: list[_Slot]) -> None:
        """Wait a moment for answers; an empty one is the end of the process."""
        ready, _, _ = select.select([slot.answers for slot in busy], [], [], _POLL_S)
        for slot in busy:
            if slot.answers in ready:
                self._settle(slot, slot.answers.readline())

    def _settle(self, slot: _Slot, answer: bytes) -> None:
        folder, slot.folder = slot.folder, None
        assert folder is not None
        name, why = folder.path.name, json.loads(answer) if answer else self._end(slot)
        if why is None:
            self._board.done(name)
        elif not answer and (self._killing or (self._signal and slot.is_stopped())):
            self._board.stopped(name)
        else:
            self._board.failed(name, why)
            self._outcome.failures.append(FailedRun(name, why, log_of(folder)))

    def _end(self, slot: _Slot) -> str:
        slot.process.wait()
        why = slot.why()
        self._slots.remove(slot)
        slot.close()
        return why

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, *STOP_SIGNALS)}
        try:
            yield
        finally:
            for slot in self._slots:
                if slot.folder:  # after an error of the sweep itself
                    slot.process.terminate()
                slot.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._killing = number == self._signal == signal.SIGINT
        self._signal = number
        self._pass_on()

    def _pass_on(self) -> None:
        """Have the runs save and stop; they are not of the terminal's group, so that Ctrl-C reaches them here alone."""
        asked = signal.SIGUSR1 if self._signal == signal.SIGUSR1 else signal.SIGTERM
        for slot in self._slots:
            if slot.folder:
                slot.process.send_signal(signal.SIGKILL if self._killing else asked)


def _job(config: TrainConfig, folder: RunFolder, *, at_once: int) -> Job:
    """Return a run with its share of the cores, where OMP_NUM_THREADS does not say otherwise."""
    share = max(1, num_cores() // (at_once * num_processes(config)))
    threads = None if os.environ.get("OMP_NUM_THREADS") else share
    return Job(config=config, folder=folder, command=sys.argv, threads=threads)


def _start() -> _Slot:
    words = tempfile.TemporaryFile()  # noqa: SIM115 - open until the process has ended
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.sweeps.local_sweep_worker", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=words,
        bufsize=0,
        env=child_environment(),
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    return _Slot(process, process.stdin, process.stdout, words)
