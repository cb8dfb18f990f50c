"""Run compiled loops on several threads: as many as ``torch.get_num_threads()`` of the caller.

A loop that releases the GIL is called for consecutive parts of a vector, by the caller and by helper threads that wait
between steps. A free thread takes the next part, so a helper without a core delays nothing. Results must not depend on
the parts: sums use units of a fixed length, and parts begin at multiples of it.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch

LEAST = 1 << 20  # elements of a part: to hand one over costs some ten microseconds
ENTRY = 32  # elements that are read in a row in the time of one that is read by its index
PARTS = 2  # for each thread, so that one that is late leaves the rest to the others

T = TypeVar("T")


def entries_in_parts(work: Callable[[int, int], T], count: int) -> list[T]:
    """Return what `in_parts` does for entries of a list, each at a place of its own in a vector: few fill a part."""
    return _shared(work, count, LEAST // ENTRY, 1)


def in_parts(work: Callable[[int, int], T], numel: int, *, unit: int = 1, moved: float = 4.0) -> list[T]:
    """Return ``work(start, stop)`` of neighbouring parts of [0, numel), in order; short vectors are one part.

    Args:
        work: calls compiled loops and little else; threads call it at the same time.
        unit: parts begin at multiples of it.
        moved: bytes of memory that are read and written for each element; by default a float32 is read.
    """
    _local.moved = getattr(_local, "moved", 0.0) + moved * numel
    return [work(0, numel)] if numel < 2 * LEAST else _shared(work, numel, LEAST, unit)


def _shared(work: Callable[[int, int], T], numel: int, least: int, unit: int) -> list[T]:
    num_threads = 1 if numel < 2 * least else available()
    if num_threads == 1:
        return [work(0, numel)]
    spans = _spans(numel, num_threads, least, unit)
    found: list[Any] = [None] * len(spans)
    left = deque(range(len(spans)))

    def do_parts() -> None:
        while left:
            try:
                number = left.popleft()
            except IndexError:  # another thread took the last
                return
            found[number] = work(*spans[number])

    helpers = [_helpers().submit(do_parts) for _ in range(num_threads - 1)]
    try:
        do_parts()
    finally:
        for helper in helpers:
            if not helper.cancel():  # one that has not begun is not waited for
                helper.result()
    return found


def _spans(numel: int, num_threads: int, least: int, unit: int) -> list[tuple[int, int]]:
    size = max(-(-numel // (PARTS * num_threads)), least)
    size = -(-size // unit) * unit
    return [(start, min(start + size, numel)) for start in range(0, numel, size)]


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="micro-loops")


def moved_bytes() -> float:
    """Return how many bytes loops that this thread called read from memory and wrote to it, as their callers say."""
    number: float = getattr(_local, "moved", 0.0)
    return number


def are_few(numel: int) -> bool:
    """Tell whether so few elements are one part, whatever the number of threads."""
    return numel < 2 * LEAST


def are_few_entries(count: int) -> bool:
    """Tell whether so many entries are one part, whatever the number of threads."""
    return count < 2 * (LEAST // ENTRY)


def available() -> int:
    """Return how many threads a loop of the calling thread may use now."""
    is_busy = getattr(_local, "is_busy", None)
    return 1 if is_busy is not None and is_busy() else torch.get_num_threads()


@contextmanager
def one_while(is_busy: Callable[[], bool] | None) -> Iterator[None]:
    """Have loops of the calling thread use no other thread while ``is_busy()``, which each of them asks.

    The lane that reduces beside backward does so: backward's operations use all threads of the rank.
    """
    before = getattr(_local, "is_busy", None)
    _local.is_busy = is_busy
    try:
        yield
    finally:
        _local.is_busy = before


_local = threading.local()
os.register_at_fork(after_in_child=_helpers.cache_clear)  # a forked process has none of its parent's threads
