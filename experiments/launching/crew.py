"""One rank on each host, driven from outside: it does what it is told, in turn, and answers.

Requests and answers are lines of JSON on the ranks' standard input and output, so that they cost the links nothing.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from experiments.config.errors import one_line_with_type
from experiments.launching.child_environment import num_cores, with_python_path
from experiments.launching.failures import Failure, Kind, RankFailure, is_lost_peer, root_cause
from experiments.launching.namespaces import Hosts, stop

Answer = Any  # plain values
Task = Callable[..., Answer]
_PORT = 29500
_TIMEOUT_S = 600  # of a collective: a large vector on a slow link takes minutes


class Crew:
    """The ranks of a ``with``, one process on each host; they are killed at its end.

    Args:
        module: what each runs; its ``__main__`` calls ``serve``.
    """

    def __init__(self, hosts: Hosts, module: str) -> None:
        self._hosts, self._module = hosts, module
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        world_size = len(self._hosts.names)
        common = {
            "PYTHONPATH": with_python_path(os.environ)["PYTHONPATH"],
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores() // world_size)),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self._hosts.addresses[0],
            "MASTER_PORT": str(_PORT),
        }
        command = [sys.executable, "-u", "-m", self._module]
        with ExitStack() as undo:
            undo.callback(stop, self._processes)
            self._logs = [undo.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world_size)]
            for rank, log in enumerate(self._logs):
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
                self._processes.append(self._hosts.start(rank, command, {**common, "RANK": str(rank)}, **pipes))
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def call(self, task: str, **settings: Any) -> list[Answer]:
        """Let every rank do a task at once and return their answers in rank order.

        Args:
            settings: of the task, plain values.

        Raises:
            RankFailure: a rank raised or died.
        """
        line = json.dumps({"task": task, "settings": settings}) + "\n"
        for process in self._processes:
            assert process.stdin
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it has died: reading its answer tells how
        return self._answers()

    def _answers(self) -> list[Answer]:
        answers, failures = [], []
        for rank, process in enumerate(self._processes):
            assert process.stdout
            line = process.stdout.readline()
            found = json.loads(line) if line else {"died": process.wait()}
            if "answer" in found:
                answers.append(found["answer"])
            else:
                failures.append(self._failure(rank, found))
        if failures:
            raise RankFailure(root_cause(failures))
        return answers

    def _failure(self, rank: int, found: Mapping[str, Any]) -> Failure:
        log = self._logs[rank]
        log.seek(0)
        last = [line for line in log.read().splitlines() if line.strip()][-1:]
        words = "".join(f", last words: {' '.join(line.split())}" for line in last)
        code = found.get("died", 0)
        told = found.get("error") or (
            f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}{words}"
        )
        died = Kind.KILLED if found.get("died", 0) < 0 else Kind.EXIT
        kind = (Kind.LOST_PEER if found["collective"] else Kind.ERROR) if "error" in found else died
        when = found.get("time", time.time())
        return Failure(rank=rank, kind=kind, message=told, time=when, exit_code=None, log=self._hosts.names[rank])


def serve(tasks: Mapping[str, Task]) -> None:
    """Be one rank of a crew: join the others, then do what is asked until the asker is gone.

    Args:
        tasks: by name; each takes the settings by keyword, and its answer must be plain values.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    joined = False
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if not joined:
                dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
                joined = True
            told = {"answer": tasks[request["task"]](**request["settings"])}
        except Exception as error:
            message = one_line_with_type(error)
            told = {"error": message, "collective": is_lost_peer(error), "time": time.time()}
        answers.write(json.dumps(told) + "\n")
        if "error" in told:
            os._exit(1)  # at once: a thread that waits for a peer would keep a normal exit waiting too
    os._exit(0)
