"""Run measurements in this process or in a pool of processes."""

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from experiments.launching.rank_environment import die_with_parent


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement: its name, the list of Comparison for its result, and a call that can be pickled."""

    name: str
    kind: str
    call: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished task: its result, or an error in one line."""

    task: Task
    result: Any = None
    failure: str = ""


def carry_out(tasks: Sequence[Task], pool: ProcessPoolExecutor | None) -> Iterator[Ended]:
    """Run the tasks and yield each when it has finished.

    The pool runs the last tasks first, because they have the most ranks and take longest; without a pool, this process
    runs them.
    """
    if pool is None:
        ended: Iterable[tuple[Task, Callable[[], Any]]] = ((task, task.call) for task in tasks)
    else:
        futures = {pool.submit(task.call): task for task in reversed(tasks)}
        ended = ((futures[future], future.result) for future in as_completed(futures))
    for task, result in ended:
        try:
            yield Ended(task, result())
        except BrokenProcessPool:
            raise
        except Exception as error:
            yield Ended(task, failure=f"{type(error).__name__}: {error}")


@contextmanager
def processes(number: int) -> Iterator[ProcessPoolExecutor | None]:
    """Provide a pool of processes for a ``with``, killed at its end; None for a single process."""
    if number == 1:
        yield None
        return
    pool = ProcessPoolExecutor(number, mp_context=multiprocessing.get_context("spawn"), initializer=_prepare)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.kill()
            process.join()


def _prepare() -> None:
    """End this process silently on Ctrl-C and when its parent dies; load the compiled kernels."""
    from micro.kernels import preparing

    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    preparing.prepare()
