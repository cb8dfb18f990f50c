"""Measurements carried out in processes, one per core; what is done stays on disk, so that a command goes on."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.launching.process_lifetime import die_with_parent
from experiments.reports.output import write_file

ENVIRONMENT = {  # of a process that measures; the memory is that of glibc
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),  # vectors shorter than that, in bytes, are made again at every step
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),  # so their memory is kept for the next step
}


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement: its name, which no other one has, the list of Comparison that its result belongs to, a call.

    The call can be pickled, and its result written as JSON.
    """

    name: str
    kind: str
    call: Callable[[], Any]


class Results:
    """Results of tasks by their names, in a file with a line for each after one that says what they follow from.

    Where the file has another basis (settings and code) its results count for nothing: the first new one replaces them.
    """

    def __init__(self, path: Path, basis: dict[str, Any]) -> None:
        self._path, self._head = path, json.dumps(basis, sort_keys=True, default=str)
        self.done: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        self._is_begun = False
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines[1:] if lines[:1] == [self._head] else []:
            with suppress(ValueError):  # an interrupt may have torn the last line
                name, result = json.loads(line)
                self.done[name] = result

    def add(self, name: str, result: Any) -> None:
        """Keep a result."""
        if not self._is_begun:
            write_file(self._path, "\n".join([self._head, *map(json.dumps, self.done.items()), ""]))
            self._is_begun = True
        self.done[name] = result
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, result]) + "\n")

    def forget(self) -> None:
        """Remove the file: nothing is left to measure."""
        self._path.unlink(missing_ok=True)


def carry_out(tasks: Sequence[Task], results: Results, pool: ProcessPoolExecutor | None) -> Iterator[str]:
    """Carry out the tasks that have no result yet; yield the name of each when its result is there, or has failed.

    The pool makes the calls, the last ones first: they have most ranks, and take longest; else this process does.
    """
    left = {task.name: task.call for task in tasks if task.name not in results.done}
    yield from (task.name for task in tasks if task.name not in left)
    if pool is None:
        ended: Iterable[tuple[str, Callable[[], Any]]] = left.items()
    else:
        futures = {pool.submit(left[name]): name for name in reversed(left)}
        ended = ((futures[future], future.result) for future in as_completed(futures))
    for name, result in ended:
        try:
            results.add(name, result())
        except BrokenProcessPool:
            raise
        except Exception as error:
            results.failed[name] = f"{type(error).__name__}: {error}"
        yield name


@contextmanager
def processes(number: int) -> Iterator[ProcessPoolExecutor | None]:
    """Give processes for the time of a ``with``, at whose end they are killed; None in place of one."""
    if number == 1:
        yield None
        return
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)  # processes inherit it
    pool = ProcessPoolExecutor(number, mp_context=multiprocessing.get_context("spawn"), initializer=_prepare)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.kill()
            process.join()
        os.environ.clear()
        os.environ.update(before)


def _prepare() -> None:
    """Let Ctrl-C end this process without a word, and its parent's death; load the compiled kernels."""
    from micro import kernels

    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    kernels.prepare()
