"""Ranks that tests share: processes that stay up from one test to the next, because starting them is what costs.

``ranks(2).run(work)`` calls a function on ranks that are in one torch.distributed group. ``ranks(2).run_apart(work)``
calls one that makes its own group, as the main function of a script does, or Accelerate, Lightning, a Trainer. Both
find torch, its compiler (which DDP and optimizers import) and micro imported, because they are forked from a process
that has imported them. Tests that use them are in the xdist group "ranks", so that one worker has the processes.
"""

import functools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.tools.ranks import worker
from experiments.tools.ranks.group import GroupError, RankGroup
from tests.ports import free_port
from tests.waiting import LIMIT_S

COLLECTIVE_S = LIMIT_S
PRELOADED = ["tests.dist.preloaded"]


class RankError(AssertionError):
    """A rank raised an exception, died or did not answer; the message says which, with the traceback of the first."""


@dataclass(frozen=True)
class _Forked:
    """A forked process as `RankGroup` knows one."""

    process: BaseProcess

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout_s: float | None = None) -> int | None:
        self.process.join(timeout_s)
        return self.process.exitcode


class ForkedRanks(RankGroup):
    """Ranks that need not import torch: that is most of what it costs to start them."""

    def start_process(self, number: int, connection: Connection, log: Path) -> Any:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        process = context.Process(target=_serve, args=(connection, log, self.environment(number)), daemon=True)
        process.start()
        return _Forked(process)


class Ranks:
    """``world_size`` processes in one torch.distributed group.

    A test in which a rank fails, or that takes too long, costs the group; the next test gets a fresh one.
    """

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self.backend = backend
        self._group: RankGroup | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="micro-tests-")
        self._num_apart = 0

    def run(self, work: Callable[..., Any], *args: Any, timeout_s: float = LIMIT_S) -> list[Any]:
        """Call ``work(*args)`` on every rank at once and return the results in rank order.

        Args:
            work: a function of a module, so that the processes can import it.

        Raises:
            RankError: a rank raised an exception, died, or did not answer in time.
        """
        return self._call(_call, work, args, timeout_s=timeout_s)

    def run_apart(self, work: Callable[..., Any], *args: Any, timeout_s: float = LIMIT_S) -> list[Any]:
        """Call ``work(*args)`` on every rank, in no group, with the environment variables of torchrun.

        ``work`` may call init_process_group() or have a framework do it, and leave its group or not: afterwards the
        ranks are in their own group again. Environment variables and the working directory are restored too. Other
        state of the process (a framework's singletons, say) is the work's to clear.

        Raises:
            RankError: as for ``run``. A test that kills a rank gets this error.
        """
        self._num_apart += 1
        store = Path(self._folder.name) / f"store{self._num_apart}"
        return self._call(_call_apart, work, args, free_port(), store, timeout_s=timeout_s)

    def close(self) -> None:
        """End the processes; those that no failure has ended save what coverage measured in them."""
        if self._group is not None:
            with suppress(GroupError):
                self._group.call(save_coverage, timeout_s=LIMIT_S)
            self._group.__exit__(None, None, None)
        self._group = None

    def _call(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        if self._group is None:
            env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            group = ForkedRanks(self.world_size, backend=self.backend, env=env, collective_s=COLLECTIVE_S)
            self._group = group.__enter__()
        try:
            return self._group.call(function, *args, timeout_s=timeout_s)
        except GroupError as error:
            self._group.__exit__(None, None, None)
            self._group = None
            raise RankError(f"{error}\n{error.traceback}") from None


@functools.cache
def ranks(world_size: int, backend: str = "gloo") -> Ranks:
    """Return the group of this size that all tests share; it starts when first used and ends with the test run."""
    group = Ranks(world_size, backend)
    _shared.append(group)
    return group


def close_all() -> None:
    """End the groups that tests share."""
    for group in _shared:
        group.close()


def save_coverage() -> None:
    """Write what coverage has measured: the process will be killed."""
    measured = sys.modules["coverage"].Coverage.current() if "coverage" in sys.modules else None
    if measured:
        measured.save()


_shared: list[Ranks] = []


def _serve(connection: Connection, log: Path, variables: Mapping[str, str]) -> None:
    """Be a rank, with the environment and the output of a process that was started for it."""
    os.environ.clear()
    os.environ.update(variables)
    os.setsid()
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)  # a fork has none of torch's threads: one thread must make them anew
    worker.serve(connection)


def _call(work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    _leave_groups()  # not before: another rank may have been in one
    return work(*args)


def _call_apart(work: Callable[..., Any], args: tuple[Any, ...], port: int, store: Path) -> Any:
    backend, rank, world_size = dist.get_backend(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    environ, folder = dict(os.environ), Path.cwd()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    answer = work(*args)  # after an exception the process ends: there is nothing to restore
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    if dist.is_initialized():
        dist.destroy_process_group()
    limit = timedelta(seconds=COLLECTIVE_S)
    dist.init_process_group(backend, init_method=store.as_uri(), rank=rank, world_size=world_size, timeout=limit)
    return answer


def _leave_groups() -> None:
    """Give up the groups that the last test made: each has threads that wake many times a second for ever."""
    for group in list(dist.distributed_c10d._world.pg_map):
        of_all = group.size() == dist.get_world_size()
        if group is not dist.group.WORLD and (of_all or torch.__version__ >= "2.14"):  # before: its name is used again
            dist.destroy_process_group(group)
