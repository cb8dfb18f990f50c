"""Processes that are the ranks of one torch.distributed group and call the same function together."""

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from experiments.config.child_environment import num_cores, with_python_path
from experiments.config.paths import ROOT
from experiments.ranks import worker

START_S = 100  # time for all processes to import torch and to meet
COLLECTIVE_S = 600  # time limit of a collective: a large vector on a slow link takes minutes
GRACE_S = 5  # time for the others to answer after a rank failed: they may wait for it in a collective
EXIT_S = 30  # time for a process to end after it has closed its connection
LOST_PEER = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out|socket timeout|SIGABRT", re.I
)


class RankFailure(RuntimeError):
    """A rank raised, died, or did not answer in time, and made the call fail; the message is one line.

    Attributes:
        rank: the rank that failed first.
        log: the file with its output.
        traceback: of its exception; empty if it left none.
    """

    def __init__(self, rank: int, message: str, log: Path, *, raised_at: float, traceback: str = "") -> None:
        super().__init__(f"rank {rank} failed: {message} (log: {log})")
        self.rank = rank
        self.log = log
        self.traceback = traceback
        self.raised_at = raised_at
        self.is_of_a_peer = bool(LOST_PEER.search(message))


@dataclass(frozen=True, slots=True)
class Rank:
    """A process, the connection on which it answers, and the file with its output."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path

    def receive(self) -> Any:
        """Return the answer to the oldest call. Raises: RankFailure: the call raised, or the process ended."""
        try:
            returned, value = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise RankFailure(self.number, self._how_it_ended(), self.log, raised_at=time.time()) from None
        if not returned:
            message, traceback, raised_at = value["message"], value["traceback"], value["time"]
            raise RankFailure(self.number, message, self.log, raised_at=raised_at, traceback=traceback)
        return value

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection and did not end"
        last = next(reversed(self.log.read_text(errors="replace").split("\n")[:-1]), "")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}, last line of its log: {last}" if last else how


class RankGroup:
    """``world_size`` ranks that live while a ``with`` lasts; they are killed at its end.

    Args:
        backend: gloo, or nccl if each rank has its own GPU.
        prefixes: for each rank the words before its command, such as those that enter a network namespace; each rank is
            then on its own host.
        env: environment variables of the ranks. If OMP_NUM_THREADS is neither in it nor in this process's environment,
            each rank gets an equal share of the cores.
        collective_s: time limit of a collective in seconds.
        code: the folder of another revision of this repository, whose code the ranks run.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "gloo",
        prefixes: Sequence[Sequence[str]] = (),
        env: Mapping[str, str] | None = None,
        collective_s: float = COLLECTIVE_S,
        code: Path | None = None,
    ) -> None:
        self.world_size = world_size
        self._backend = backend
        self._prefixes = prefixes or [()] * world_size
        self._one_host = not prefixes
        self._env = env or {}
        self._collective_s = collective_s
        self._code = code or ROOT
        self._ranks: list[Rank] = []

    def __enter__(self) -> Self:
        """Start the ranks; the first answer waits until they have met."""
        with ExitStack() as undo:
            self._folder = Path(tempfile.mkdtemp(prefix="micro-ranks-"))
            undo.callback(self._end)
            self._have_met = self._has_failed = False
            for number in range(self.world_size):
                self._ranks.append(self._start(number))
            self.send(worker.join, self._backend, self._folder / "store", self._collective_s)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a function on all ranks at once and return its values in rank order: ``send``, then ``receive``."""
        self.send(function, *arguments)
        return self.receive(timeout_s)

    def send(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have all ranks call a function, without waiting for it.

        Args:
            function: of a module that the ranks can import, or a ``functools.partial`` of one.
        """
        assert self._ranks, "the ranks are not running: one failed, or the context has ended"
        for rank in self._ranks:
            with suppress(ConnectionError):  # it has died: receive says how
                rank.connection.send_bytes(pickle.dumps((function, arguments)))

    def receive(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for the values of the oldest call and return them in rank order.

        Args:
            timeout_s: time limit of the call in seconds, None for no limit.

        Raises:
            RankFailure: a rank raised an exception, died, or did not answer in time. All ranks are killed, and their
                logs are kept.
        """
        if not self._have_met:
            self._collect(START_S)
            self._have_met = True
        return self._collect(timeout_s)

    def _collect(self, timeout_s: float | None) -> list[Any]:
        limit_s = float("inf") if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        values: dict[int, Any] = {}
        failures: list[RankFailure] = []
        waiting = {rank.connection: rank for rank in self._ranks}
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), None if left_s == float("inf") else left_s):
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    values[rank.number] = rank.receive()
                except RankFailure as error:
                    failures.append(error)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if not failures:
            late = f"no answer within {limit_s:g} s"
            failures = [RankFailure(rank.number, late, rank.log, raised_at=time.time()) for rank in waiting.values()]
        if failures:
            self._has_failed = True
            self._end()
            raise min(failures, key=lambda failure: (failure.is_of_a_peer, failure.raised_at))
        return [values[number] for number in range(self.world_size)]

    def _start(self, number: int) -> Rank:
        log = self._folder / f"rank{number}.log"
        ours, theirs = Pipe()
        with theirs, log.open("ab") as output:
            process = subprocess.Popen(
                [
                    *self._prefixes[number],
                    *(sys.executable, "-u", "-m", worker.__name__, str(theirs.fileno()), str(os.getpid())),
                ],
                env=self._environment(number),
                cwd=self._code if self._code != ROOT else None,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the parent alone
            )
        return Rank(number, process, ours, log)

    def _environment(self, number: int) -> dict[str, str]:
        variables = {
            "OMP_NUM_THREADS": str(max(1, num_cores() // self.world_size)),
            **os.environ,
            **self._env,
            "RANK": str(number),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(number if self._one_host else 0),
            "LOCAL_WORLD_SIZE": str(self.world_size if self._one_host else 1),
        }
        return with_python_path(variables, self._code)

    def _end(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.connection.close()
        self._ranks = []
        if not self._has_failed:
            shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def measuring_ranks(world_size: int, *, device: str = "auto", code: Path | None = None) -> Iterator[RankGroup]:
    """Yield ranks on GPUs if each can have one and ``device`` allows it, else on the CPU; ``code``: see `RankGroup`."""
    import torch

    on_gpus = device != "cpu" and torch.cuda.device_count() >= world_size
    with RankGroup(world_size, backend="nccl" if on_gpus else "gloo", code=code) as ranks:
        yield ranks
