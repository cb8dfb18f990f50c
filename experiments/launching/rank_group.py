"""Worker processes that are the ranks of one torch.distributed group and call the same function together."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from experiments.launching.child_environment import num_cores
from experiments.launching.failures import Failure, Kind, RankFailure, root_cause
from experiments.launching.process_lifetime import kill_all
from experiments.launching.worker_process import WorkerFailure, WorkerProcess

START_S = 100  # time for all processes to import torch and to meet
COLLECTIVE_S = 600  # time limit of a collective: a large vector on a slow link takes minutes
GRACE_S = 5  # time for the others to answer after a rank failed; they may wait for it in a collective


class RankGroup:
    """``world_size`` ranks on this machine that live while a ``with`` lasts; they are killed at its end.

    Args:
        backend: gloo, or nccl if each rank has its own GPU.
        prefixes: For each rank the words before its command, such as those that enter a network namespace; each rank
            is then on its own host.
        env: Environment variables of the ranks. If OMP_NUM_THREADS is neither in it nor in this process's environment,
            each rank gets an equal share of the cores.
        collective_s: Time limit of a collective in seconds.
        code: The folder of another revision of this repository, whose code the ranks run.
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
        self._code = code
        self._workers: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        """Start the ranks; the first call waits until they have met."""
        with ExitStack() as undo:
            self._folder = Path(tempfile.mkdtemp(prefix="micro-ranks-"))
            undo.callback(self._end)
            self._have_met = self._has_failed = False
            for rank, prefix in enumerate(self._prefixes):
                log = self._folder / f"rank{rank}.log"
                self._workers.append(WorkerProcess(log, env=self._variables(rank), prefix=prefix, code=self._code))
                self._workers[rank].send(_join, self._backend, self._folder / "store", self._collective_s)
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
            function: Of a module that the ranks can import, or a ``functools.partial`` of one.
        """
        assert self._workers, "the ranks are not running: one failed, or the context has ended"
        for worker in self._workers:
            worker.send(function, *arguments)

    def receive(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for the values of the oldest call and return them in rank order.

        Args:
            timeout_s: Time limit of the call in seconds, None for no limit.

        Raises:
            RankFailure: A rank raised an exception, died, or did not answer in time. All ranks are killed, and their
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
        failures: dict[int, Failure] = {}
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), None if left_s == float("inf") else left_s):
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    values[rank] = self._workers[rank].receive()
                except WorkerFailure as error:
                    failures[rank] = self._failure(rank, error)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if not failures:
            failures = {rank: self._late(rank, limit_s) for rank in waiting.values()}
        if failures:
            self._has_failed = True
            self._end()
            raise RankFailure(root_cause(list(failures.values())))
        return [values[rank] for rank in range(self.world_size)]

    def _failure(self, rank: int, error: WorkerFailure) -> Failure:
        report = error.report
        return Failure(
            rank=rank,
            kind=error.kind,
            message=str(error),
            time=report.time if report else time.time(),
            exit_code=error.exit_code,
            log=str(self._workers[rank].log),
            traceback=report.traceback if report else None,
        )

    def _late(self, rank: int, limit_s: float) -> Failure:
        return Failure(
            rank=rank,
            kind=Kind.STOPPED,
            message=f"no answer within {limit_s:g} s",
            time=time.time(),
            exit_code=None,
            log=str(self._workers[rank].log),
        )

    def _end(self) -> None:
        kill_all([worker.process for worker in self._workers])
        for worker in self._workers:
            worker.close()
        self._workers = []
        if not self._has_failed:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _variables(self, rank: int) -> dict[str, str]:
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores() // self.world_size))
        return {
            "OMP_NUM_THREADS": threads,
            **self._env,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(rank if self._one_host else 0),
            "LOCAL_WORLD_SIZE": str(self.world_size if self._one_host else 1),
        }


def _join(backend: str, store: Path, collective_s: float) -> None:
    """Join the process group as the rank that the environment variables name."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        backend,
        init_method=store.as_uri(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=collective_s),
    )
