"""Threads of simulated ranks: to compute in parallel, and to run synchronous code."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from micro.comm.ranks import Comm
from micro.comm.requests import Reduction, Request

T = TypeVar("T")


def cores_for(world_size: int) -> ThreadPoolExecutor | None:
    """Return what computes for so many ranks at a time as torch's operations have threads here; None: one by one."""
    num_threads = torch.get_num_threads()
    return _cores(num_threads) if min(num_threads, world_size) > 1 else None


@cache
def _cores(num_threads: int) -> ThreadPoolExecutor:
    """Return as many threads, in which torch's operations have one thread each, kept for all that is simulated."""
    have_begun = threading.Barrier(num_threads + 1)
    pool = ThreadPoolExecutor(num_threads, "simulated_ranks", initializer=_one_thread)
    for _ in range(num_threads):
        pool.submit(have_begun.wait)
    have_begun.wait()
    torch.set_num_threads(num_threads)  # new threads take the last number set
    return pool


os.register_at_fork(after_in_child=_cores.cache_clear)  # a child has none of its parent's threads


def _one_thread() -> None:
    """Give torch's operations one thread here: the ranks are the parallelism."""
    torch.get_num_threads()  # sets this thread's number, which would otherwise happen later and undo the next line
    torch.set_num_threads(1)


def ask(requests: Sequence[Request]) -> list[Any]:
    """Return the answers to what synchronous code requests that `in_thread` runs in this thread.

    Raises:
        RuntimeError: this is no such thread.
        PeerError: another rank has failed, or requests something else.
    """
    asked = getattr(_here, "ask", None)
    if asked is None:
        raise RuntimeError("what a simulated rank requests is answered within SimulatedRanks.carry_out or run")
    answers: list[Any] = asked(list(requests))
    return answers


_here = threading.local()


def in_thread(work: Callable[[Comm], T], comm: Comm) -> Reduction[T]:
    """Return synchronous code of a rank as a reduction: it runs in a thread, and what it requests is yielded here."""
    asked, told = SimpleQueue[Any](), SimpleQueue[Any]()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def ask_here(requests: list[Request]) -> list[Any]:
        asked.put(requests)
        answers: list[Any] | BaseException = told.get()
        if isinstance(answers, BaseException):
            raise answers
        return answers

    def body() -> None:
        _one_thread()
        _here.ask = ask_here
        ended: Future[T] = Future()
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                ended.set_result(work(comm))
        except BaseException as error:
            ended.set_exception(error)
        asked.put(ended)

    threading.Thread(target=body, name=f"rank_{comm.rank}", daemon=True).start()
    error: BaseException | None = None
    while not isinstance(said := asked.get(), Future):
        if error is None:
            try:
                told.put((yield said))
                continue
            except BaseException as thrown:  # another rank has failed: this one is to know, and to end
                error = thrown
        told.put(error)
    result: T = said.result()
    return result
