"""A worker process: a child that calls the functions that this process sends, one by one, and returns their values."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from experiments.config.paths import ROOT
from experiments.launching.child_environment import child_environment
from experiments.launching.failures import Kind, describe_exit, kind_of_exit
from experiments.launching.worker_main import ErrorReport

_EXIT_S = 30  # time for a process to end after it closed its end of the connection


class WorkerFailure(RuntimeError):
    """A call raised an exception, or the process ended before it answered; the message is one line.

    Attributes:
        kind: What kind of failure it is.
        report: Of the exception; None if the process ended without one.
        exit_code: Of the process; None if it reported an exception.
    """

    def __init__(
        self, message: str, kind: Kind, *, report: ErrorReport | None = None, exit_code: int | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.report = report
        self.exit_code = exit_code


class WorkerProcess:
    """A child process that answers calls one after another.

    It ends when this process closes it or dies. It runs in a session of its own, so that Ctrl-C reaches this process
    alone.

    Attributes:
        process: The child.
        connection: Receives its answers; ``multiprocessing.connection.wait`` waits for one of several connections.
        log: File with its output and the traceback of an exception.

    Args:
        env: Environment variables added to those of this process.
        prefix: Words before the command, such as those that enter a network namespace; they must ``exec`` it.
        at_parent_death: The signal that ends it when this process dies.
        code: The folder of another revision of this repository, in which it runs with that revision's code.
    """

    def __init__(
        self,
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        at_parent_death: signal.Signals = signal.SIGKILL,
        code: Path | None = None,
    ) -> None:
        self.log = log
        self.connection, child = Pipe()
        words = map(str, (child.fileno(), os.getpid(), int(at_parent_death)))
        with child, log.open("ab") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-u", "-m", "experiments.launching.worker_main", *words],
                env=child_environment(code or ROOT, **(env or {})),
                cwd=code,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[child.fileno()],
                start_new_session=True,
            )

    def send(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have the process call a function, after those that were sent before.

        Args:
            function: Of a module that the process can import, or a ``functools.partial`` of one.
        """
        with suppress(ConnectionError):  # it has died: receive says how
            self.connection.send_bytes(pickle.dumps((function, arguments)))

    def receive(self) -> Any:
        """Wait for the answer to the oldest call that has none yet, and return it.

        Raises:
            WorkerFailure: The call raised an exception, or the process has ended.
        """
        try:
            returned, value = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            exit_code = self._wait()
            kind = kind_of_exit(exit_code, self.log)
            raise WorkerFailure(describe_exit(exit_code, self.log), kind, exit_code=exit_code) from None
        if not returned:
            raise WorkerFailure(value.message, Kind.LOST_PEER if value.lost_peer else Kind.ERROR, report=value)
        return value

    def close(self) -> None:
        """End the process after its current call, and wait for its end."""
        self.connection.close()
        self.process.wait()

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.close()

    def _wait(self) -> int:
        try:
            return self.process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
