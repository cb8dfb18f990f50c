"""Trials in several processes at a time, each with one core; they read the gradients from one file."""

import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from experiments.launching.child_environment import keep_to_core
from experiments.launching.worker_process import WorkerFailure, WorkerProcess
from experiments.studies.gradient_sources import Gradients
from micro import Layout

Call = Callable[[], Any]
ENVIRONMENT = {  # of a process that runs trials; the memory is that of glibc
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # ranks are threads of which one runs at a time: they share what is free
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),  # vectors shorter than that, in bytes, are made again at every step
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),  # so their memory is kept for the next step
}
OBJECTS_PER_SEARCH = 10_000  # new ones, between two searches for unused objects; Python's own number is 700


@dataclass(frozen=True, slots=True)
class Failed:
    """In place of the value of a call that failed: why, in one line."""

    reason: str


@dataclass(frozen=True, slots=True)
class FileGradients(Gradients):
    """Gradients in a file, which another process maps into its memory when it receives them."""

    path: Path

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what another process opens them with."""
        return mapped, (self.stream, self.layout, tuple(self.rows.shape), self.path)


def put_on_file(gradients: Gradients, path: Path) -> FileGradients:
    """Return the same gradients, in a file from now on."""
    on_file = mapped(gradients.stream, gradients.layout, tuple(gradients.rows.shape), path)
    on_file.rows.copy_(gradients.rows)
    return on_file


@lru_cache(maxsize=1)
def mapped(stream: str, layout: Layout, shape: tuple[int, ...], path: Path) -> FileGradients:
    """Return the gradients that a file holds; it is as long as they are, or becomes so."""
    rows = torch.from_file(str(path), shared=True, size=torch.Size(shape).numel()).view(shape)
    return FileGradients(stream, layout, rows, path)


class Processes:
    """Processes that work while a ``with`` lasts, and a folder for what they share.

    Args:
        number: of processes, which `start` or their first calls start; 1: calls are made in this one.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._workers: list[WorkerProcess] = []
        self._starting: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        """Make the folder."""
        with ExitStack() as owned:
            self._folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="micro-compare-")))
            owned.callback(self._end)
            self._owned = owned.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owned.close()

    @property
    def are_several(self) -> bool:
        """Whether calls are made in processes of their own."""
        return self._number > 1

    def file(self, name: str) -> Path:
        """Return a path in the folder that all processes share."""
        return self._folder / name

    def start(self, num_calls: int) -> None:
        """Start as many processes as this number of calls needs, side by side; `run` waits until they are ready."""
        if self.are_several:
            for number in range(len(self._workers), min(self._number, num_calls)):
                self._workers.append(self._begun(number))
                self._starting.append(self._workers[number])

    def run(self, calls: Sequence[Call], begins: Callable[[int], None]) -> Iterator[tuple[int, Any]]:
        """Make calls, as many at a time as there are processes; yield the place and the value of each that ends.

        Args:
            calls: what can be pickled, where there are several processes.
            begins: called with the place of each call that begins.
        """
        if self._number == 1:
            for place, call in enumerate(calls):
                begins(place)
                yield place, answer(call)
            return
        self.start(len(calls))
        while self._starting:
            self._starting.pop().receive()
        waiting, idle = list(range(len(calls))), list(range(len(self._workers)))
        busy: dict[int, int] = {}  # which worker makes which call
        while waiting or busy:
            while waiting and idle:
                worker, place = idle.pop(), waiting.pop()  # the last trials have most ranks, and take longest
                begins(place)
                self._workers[worker].send(answer, calls[place])
                busy[worker] = place
            for worker in self._answering(busy):
                yield busy.pop(worker), self._received(worker)
                idle.append(worker)

    def _answering(self, busy: dict[int, int]) -> list[int]:
        ready = wait([self._workers[worker].connection for worker in busy])
        return [worker for worker in busy if self._workers[worker].connection in ready]

    def _received(self, worker: int) -> Any:
        """Return a worker's value; start another in place of one that died."""
        try:
            return self._workers[worker].receive()
        except WorkerFailure as error:
            self._workers[worker].kill()
            self._workers[worker] = self._begun(worker)
            self._workers[worker].receive()
            return Failed(str(error))

    def _begun(self, number: int) -> WorkerProcess:
        """Return a process that has yet to answer that it is ready."""
        worker = WorkerProcess(self._folder / f"{os.getpid()}-{number}.log", env=ENVIRONMENT)
        worker.send(_prepare, number)
        return worker

    def _end(self) -> None:
        for worker in self._workers:
            worker.kill()


def answer(call: Call) -> Any:
    """Return the value of a call, or why it failed."""
    try:
        return call()
    except Exception as error:
        return Failed(f"{type(error).__name__}: {error}")


def _prepare(number: int) -> None:
    """Keep this process to one core, and load the compiled kernels.

    One rank's thread runs at a time, and what the next one reads is in that core's caches. As a batch job, a thread
    that is woken lets the one that woke it go on until it waits. Searches for unused objects are rare, and pass over
    all that is loaded.
    """
    from micro import kernels

    keep_to_core(number)
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    kernels.prepare()
    gc.freeze()
    gc.set_threshold(OBJECTS_PER_SEARCH)
