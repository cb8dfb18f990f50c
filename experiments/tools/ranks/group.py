"""The class RankGroup: processes that form a torch.distributed group and call functions together."""

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from experiments.config import ROOT
from experiments.config.errors import RunFailed
from experiments.launching.rank_environment import num_cores, with_python_path
from experiments.tools.ranks import worker

START_S = 100  # time for all processes to import torch and connect
COLLECTIVE_S = 600  # time limit of a collective: a large vector on a slow link takes minutes
GRACE_S = 5  # time for other ranks to answer after a failure: they may wait in a collective
EXIT_S = 30  # time for a process to end after it has closed its connection
NO_LIMIT_S = 1e6
LOST_PEER = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out|socket timeout|SIGABRT", re.I
)


class GroupError(RunFailed):
    """A call failed because a rank raised, died, or did not answer in time; the message is one line.

    Attributes:
        rank: the rank that failed first.
        log: the file with its output.
        traceback: of its exception; empty if there is none.
        raised_at: seconds since the epoch.
    """

    def __init__(self, rank: int, message: str, log: Path, *, traceback: str = "", raised_at: float = 0.0) -> None:
        super().__init__(f"rank {rank} failed: {message} (log: {log})")
        self.rank, self.log, self.traceback = rank, log, traceback
        self.is_of_a_peer, self.raised_at = bool(LOST_PEER.search(message)), raised_at or time.time()


@dataclass(frozen=True, slots=True)
class _Rank:
    """A process, the connection for its answers, and the file with its output."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path

    def receive(self) -> Any:
        """Return its answer. Raises: GroupError: the call raised, or the process ended."""
        try:
            returned, value = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            code = self.process.wait(EXIT_S)
            last = next(reversed(self.log.read_text(errors="replace").split("\n")[:-1]), "")
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            how = f"{how}, last line of its log: {last}" if last else how
            raise GroupError(self.number, how, self.log) from None
        if not returned:
            text = value["traceback"]
            raise GroupError(self.number, value["message"], self.log, traceback=text, raised_at=value["time"])
        return value


class RankGroup:
    """``world_size`` rank processes inside a ``with``, killed at its end.

    Args:
        backend: gloo, or nccl if each rank has its own GPU.
        prefixes: for each rank a prefix of its command, for instance to enter a network namespace; each rank then has
            its own host.
        env: environment variables of the ranks. Without OMP_NUM_THREADS each gets an equal share of the cores.
        collective_s: time limit of a collective in seconds.
        code: folder of the repository's revision that the ranks run.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "gloo",
        prefixes: Sequence[Sequence[str]] = (),
        env: Mapping[str, str] | None = None,
        collective_s: float = COLLECTIVE_S,
        code: Path = ROOT,
    ) -> None:
        self.world_size, self._backend, self._collective_s = world_size, backend, collective_s
        self._prefixes, self._env, self._code = prefixes, env or {}, code
        self._ranks: list[_Rank] = []

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="micro-ranks-"))
        self._has_failed = False
        try:
            for number in range(self.world_size):
                self._ranks.append(self._start(number))
            self.call(worker.join, self._backend, self._folder / "store", self._collective_s, timeout_s=START_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        if not self._has_failed:
            shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = NO_LIMIT_S) -> list[Any]:
        """Call a function on all ranks at once and return its values in rank order.

        Args:
            function: of a module that the ranks can import, or a ``functools.partial`` of one.
            timeout_s: time limit of the call in seconds.

        Raises:
            GroupError: a rank raised an exception, died, or did not answer in time. All ranks are then killed, and
                their logs kept.
        """
        assert self._ranks, "the ranks are not running: one failed, or the context has ended"
        for rank in self._ranks:
            with suppress(ConnectionError):  # it has died: receive() reports how
                rank.connection.send_bytes(pickle.dumps((function, arguments)))
        end = time.monotonic() + timeout_s
        values, failures = dict[int, Any](), list[GroupError]()
        waiting = {rank.connection: rank for rank in self._ranks}
        while waiting and (left_s := end - time.monotonic()) > 0:
            for connection in wait(list(waiting), left_s):
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    values[rank.number] = rank.receive()
                except GroupError as error:
                    failures.append(error)
                    end = min(end, time.monotonic() + GRACE_S)
        if not failures:
            late = f"no answer within {timeout_s:g} s"
            failures = [GroupError(rank.number, late, rank.log) for rank in waiting.values()]
        if failures:
            self._has_failed = True
            self._end()
            raise min(failures, key=lambda failure: (failure.is_of_a_peer, failure.raised_at))
        return [values[number] for number in range(self.world_size)]

    def _start(self, number: int) -> _Rank:
        log = self._folder / f"rank{number}.log"
        ours, theirs = Pipe()
        with theirs:
            return _Rank(number, self.start_process(number, theirs, log), ours, log)

    def start_process(self, number: int, connection: Connection, log: Path) -> "subprocess.Popen[bytes]":
        """Start a rank's process, which answers calls on ``connection`` and writes to ``log``."""
        prefix = self._prefixes[number] if self._prefixes else ()
        words = [sys.executable, "-u", "-m", worker.__name__, str(connection.fileno()), str(os.getpid())]
        with log.open("ab") as output:
            return subprocess.Popen(
                [*prefix, *words],
                env=self.environment(number),
                cwd=self._code if self._code != ROOT else None,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[connection.fileno()],
                start_new_session=True,  # Ctrl-C reaches only the parent
            )

    def environment(self, number: int) -> dict[str, str]:
        """Return the environment variables of a rank."""
        variables = {
            "OMP_NUM_THREADS": str(max(1, num_cores() // self.world_size)),
            **os.environ,
            **self._env,
            "RANK": str(number),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": "0" if self._prefixes else str(number),
            "LOCAL_WORLD_SIZE": "1" if self._prefixes else str(self.world_size),
        }
        return with_python_path(variables, self._code)

    def _end(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.connection.close()
        self._ranks = []


@contextmanager
def measuring_ranks(world_size: int, *, device: str = "auto", code: Path = ROOT) -> Iterator[RankGroup]:
    """Yield ranks, on GPUs if ``device`` allows it and there are enough, else on the CPU; ``code``: see `RankGroup`."""
    import torch

    on_gpus = device != "cpu" and torch.cuda.device_count() >= world_size
    with RankGroup(world_size, backend="nccl" if on_gpus else "gloo", code=code) as ranks:
        yield ranks
