"""Real ranks for tests: processes that stay up from one test to the next, because starting them is what costs."""

import atexit
import functools
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

START_S = 90.0  # processes import torch, all at once
GRACE_S = 5.0  # how long the others get to answer once a rank has failed; they may wait for it in a collective


class RankError(AssertionError):
    """A rank failed, died or did not answer; the message holds every failed rank's own words."""


class Ranks:
    """``world_size`` processes in one torch.distributed group.

    A test in which a rank fails, or that takes too long, costs the group; the next test gets a fresh one.
    """

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self.backend = backend
        self._ends: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, work: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call ``work(*args)`` on every rank at once and return the results in rank order.

        Args:
            work: a function of a module, so that the processes can import it.

        Raises:
            RankError: a rank raised, died, or did not answer in time.
        """
        if not self._processes:
            self._start()
        for end in self._ends:
            end.send_bytes(pickle.dumps((work, args)))
        return self._check(self._collect(timeout_s))

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._ends = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, self.backend, str(store), rank, self.world_size), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)
        self._check(self._collect(START_S))

    def _check(self, answers: list[tuple[bool, Any]]) -> list[Any]:
        failures = [f"rank {rank} {answer}" for rank, (good, answer) in enumerate(answers) if not good]
        if failures:
            self.close()
            raise RankError("\n".join(failures))
        return [answer for _, answer in answers]

    def _collect(self, timeout_s: float) -> list[tuple[bool, Any]]:
        deadline = time.monotonic() + timeout_s
        answers: list[tuple[bool, Any]] = [(False, f"did not answer within {timeout_s:g} s")] * self.world_size
        waiting = dict(enumerate(self._ends))
        while waiting and time.monotonic() < deadline:
            ready = multiprocessing.connection.wait(list(waiting.values()), deadline - time.monotonic())
            for rank in [rank for rank, end in waiting.items() if end in ready]:
                answers[rank] = _receive(waiting.pop(rank))
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers


@functools.cache
def ranks(world_size: int, backend: str = "gloo") -> Ranks:
    """Return the group of this size that all tests share; it starts when first used and ends with the test run."""
    group = Ranks(world_size, backend)
    atexit.register(group.close)
    return group


def _receive(end: Connection) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pickle.loads(end.recv_bytes())
    except EOFError:
        return False, "died without a word"
    return answer


def _serve(end: Connection, backend: str, store: str, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    end.send_bytes(pickle.dumps((True, "is up")))
    while True:
        asked = pickle.loads(end.recv_bytes())
        _leave_groups()  # not before: another rank may have been in one
        end.send_bytes(pickle.dumps(_answer(*asked)))


def _leave_groups() -> None:
    """Give up the groups that the last test made: each has threads that wake many times a second for ever."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _answer(work: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, work(*args)
    except Exception:
        return False, traceback.format_exc()
