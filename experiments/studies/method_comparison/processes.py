"""Calls in several processes at a time, each with one core."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

Call = Callable[[], Any]
ENVIRONMENT = {  # of a process that runs trials; the memory is that of glibc
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),  # vectors shorter than that, in bytes, are made again at every step
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),  # so their memory is kept for the next step
}


@dataclass(frozen=True, slots=True)
class Failed:
    """In place of the value of a call that failed: why, in one line."""

    reason: str


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextmanager
def processes(number: int) -> Iterator[ProcessPoolExecutor | None]:
    """Give processes for the time of a ``with``, at whose end they are killed; None in place of one."""
    if number == 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")
    cores = context.SimpleQueue()
    for core in islice(cycle(usable_cores()), number):
        cores.put(core)
    with _environment(ENVIRONMENT):
        pool = ProcessPoolExecutor(number, mp_context=context, initializer=_prepare, initargs=(cores,))
        try:
            yield pool
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()
                process.join()


def results(pool: ProcessPoolExecutor | None, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
    """Make calls; yield the place of each that ends, and its value or Failed.

    Args:
        pool: makes the calls, the last ones first: they have most ranks, and take longest. None: in this process.

    Raises:
        BrokenProcessPool: a process died.
    """
    if pool is None:
        for place, call in enumerate(calls):
            yield place, _outcome(call)
        return
    futures = {pool.submit(_outcome, call): place for place, call in reversed(list(enumerate(calls)))}
    for future in as_completed(futures):
        yield futures[future], future.result()


def _outcome(call: Call) -> Any:
    try:
        return call()
    except Exception as error:
        return Failed(f"{type(error).__name__}: {error}")


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _prepare(cores: Any) -> None:
    """Keep this process to one core, let Ctrl-C end it without a word, and load the compiled kernels."""
    import signal

    from micro import kernels

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    core = cores.get()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    kernels.prepare()
