"""Rounds of messages: buckets that are reduced at the same time share them, so that their latencies are not in series.

A reduction that has come to a collective is left there, and another one goes on. What all of them wait for is then sent
at once: one round. With c collectives a bucket, B buckets take c rounds where all are there from the beginning, and B +
c - 1 where they come one by one during backward, in place of B c one after the other. Which messages share a round
follows from the order of the buckets and from what all ranks know, never from time: it is the same on all ranks.

A reduction is ordinary code. It has a thread, which runs only while the caller waits for it, so that one of them runs
at a time.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from micro.comm import Comm
from micro.kernels.threads import busy_of_caller, one_while
from micro.shared_messages import Copies, Done, Message, Parts, Rows, Sum, start_together
from micro.spans import Seconds

T = TypeVar("T")
U = TypeVar("U")
Task = Callable[[], None]


class AbandonedError(BaseException):
    """Ends a reduction that waits for a message which will not be sent."""


class Interrupted(Generic[T]):
    """A reduction that stops at each collective until its message was carried out.

    Args:
        work: reduces over the ranks of the comm that it is given.
        comm: these ranks; what is counted goes to its present traffic.
    """

    def __init__(self, work: Callable[[Comm], T], comm: Comm) -> None:
        self.message: Message | None = None
        self.is_done = False
        self._work = work
        self._comm = _InterruptedComm(comm, self)
        self._here, self._there = threading.Semaphore(0), threading.Semaphore(0)
        self._has_begun = self._is_running = self._is_abandoned = False
        self._outcome: list[T] = []
        self._error: BaseException | None = None
        self._as_caller = _settings_of_thread()

    def go_on(self) -> None:
        """Run until the next collective or the end.

        Raises:
            BaseException: what the reduction raised.
        """
        self.message, self._is_running = None, True
        if self._has_begun:
            self._there.release()
        else:
            self._has_begun = True
            _run(self._run)
        self._here.acquire()
        self._is_running = False
        if self._error is not None and not self._is_abandoned:
            raise self._error

    def send(self, message: Message) -> None:
        """Wait, on the reduction's thread, until ``message`` was carried out."""
        self.message = message
        self._here.release()
        self._there.acquire()
        if self._is_abandoned:
            raise AbandonedError

    def abandon(self) -> None:
        """End the reduction at the collective that it waits in."""
        self._is_abandoned = True
        if self._is_running:  # an interrupt took the caller away
            self._here.acquire()
        if self._has_begun and not self.is_done:
            self.go_on()

    def take(self) -> T:
        """Return what the reduction returned; it is done."""
        return self._outcome.pop()

    def _run(self) -> None:
        work, comm = self._work, self._comm
        del self._work, self._comm  # which refers to this object: memory would wait for a garbage collector
        try:
            with self._as_caller():
                self._outcome.append(work(comm))
        except BaseException as error:
            self._error = error
        self.is_done = True
        self._here.release()


class _InterruptedComm(Comm):
    """The ranks of ``comm`` as a reduction sees them; its clock stands still while others run."""

    def __init__(self, comm: Comm, owner: Interrupted[Any]) -> None:
        super().__init__(comm.rank, comm.world_size, timed=comm.timed)
        self.traffic = comm.traffic
        self._comm = comm
        self._owner = owner
        self._away: Seconds = 0.0

    def now(self, device: torch.device) -> Seconds:
        """Return a time, without those in which other reductions ran; see Comm."""
        return super().now(device) - self._away

    def _send(self, message: Message) -> None:
        left = message.now()
        self._owner.send(message)
        self._away += message.now() - left - message.waited
        self.traffic.num_shared += message.is_shared

    def _gather_rows(self, rows: Tensor, row: Tensor) -> None:
        self._send(Rows(comm=self._comm, rows=rows, row=row))

    def _exchange(self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]) -> None:
        self._send(
            Parts(comm=self._comm, received=received, sent=sent, received_sizes=received_sizes, sent_sizes=sent_sizes)
        )

    def _all_reduce_(self, x: Tensor) -> None:
        self._send(Sum(comm=self._comm, x=x))

    def _broadcast_(self, x: Tensor, source: int) -> None:
        self._send(Copies(comm=self._comm, x=x, source=source))


class Rounds:
    """The reductions of one group of ranks that are under way; all ranks begin them in the same order.

    Attributes:
        num_rounds: how many rounds were sent so far.
    """

    def __init__(self) -> None:
        self.num_rounds = 0
        self._under_way: list[Interrupted[Any]] = []
        self._sent: Sequence[Interrupted[Any]] = ()
        self._wait: Done = _nothing
        self._took: Seconds = 0.0  # to start what was sent

    def begin(self, work: Callable[[Comm], T], comm: Comm) -> "Begun[T]":
        """Run ``work`` up to its first collective; it goes on with the rounds that follow."""
        begun = Interrupted(work, comm)
        self._under_way.append(begun)
        begun.go_on()
        return Begun(self, begun, begun.take)

    def advance(self) -> None:
        """Wait for the round that was sent; send the next: what those wait for that have come to a collective."""
        self._receive()
        self._under_way = [each for each in self._under_way if not each.is_done]
        self._sent = [each for each in self._under_way if each.message is not None]
        messages = [each.message for each in self._sent if each.message is not None]
        if messages:
            self.num_rounds += 1
            started = messages[0].now()
            self._wait = start_together(messages)
            self._took = messages[0].now() - started

    def abandon(self) -> None:
        """End all reductions where they are: nothing more is sent."""
        under_way, self._under_way = self._under_way, []
        self._sent, self._wait = (), _nothing
        for each in under_way:
            each.abandon()

    def _receive(self) -> None:
        messages = [each.message for each in self._sent if each.message is not None]
        if not messages:
            return
        sent, wait, started = self._sent, self._wait, messages[0].now()
        self._sent, self._wait = (), _nothing
        wait()
        took = self._took + messages[0].now() - started
        for message in messages:
            message.waited = took * (1 / len(messages))
        for each in sent:
            each.go_on()


class Begun(Generic[T]):
    """A reduction that was begun; to call it sends rounds until it is done, and returns what it returned."""

    def __init__(self, rounds: Rounds, begun: Interrupted[Any], take: Callable[[], T]) -> None:
        self._rounds, self._begun, self._take = rounds, begun, take

    @property
    def is_done(self) -> bool:
        """Whether no round is needed any more; the same on all ranks."""
        return self._begun.is_done

    def __call__(self) -> T:
        """Return the outcome."""
        while not self.is_done:
            self._rounds.advance()
        return self._take()

    def then(self, change: Callable[[T], U]) -> "Begun[U]":
        """Return the same reduction with its outcome changed."""
        take = self._take
        return Begun(self._rounds, self._begun, lambda: change(take()))


def all_together(works: Sequence[Callable[[Comm], T]], comms: Iterator[Comm]) -> list[T]:
    """Return what all of ``works`` return, in their order; they share rounds.

    Args:
        comms: the ranks, for each work in turn: the traffic that they have then is that of the work.
    """
    rounds = Rounds()
    try:
        begun = [rounds.begin(work, comm) for work, comm in zip(works, comms, strict=False)]
        return [each() for each in begun]
    except BaseException:
        rounds.abandon()
        raise


def _nothing() -> None:
    """Wait for nothing."""


def _settings_of_thread() -> Callable[[], Any]:
    """Return a context manager in which another thread works as the calling one does."""
    with_gradients, num_threads, is_busy = torch.is_grad_enabled(), torch.get_num_threads(), busy_of_caller()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def as_caller() -> Iterator[None]:
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        with torch.set_grad_enabled(with_gradients), one_while(is_busy), torch.cuda.stream(stream):
            yield

    return as_caller


def _run(task: Task) -> None:
    """Run a task on a thread that is idle, or on a new one."""
    global _num_idle
    with _lock:
        is_new = _num_idle == 0
        _num_idle -= not is_new
    if is_new:
        threading.Thread(target=_serve, args=(_tasks,), name="micro-rounds", daemon=True).start()
    _tasks.put(task)


def _serve(tasks: "SimpleQueue[Task]") -> None:
    global _num_idle
    while True:
        task = tasks.get()
        task()
        del task  # what it holds must not live until the next one comes
        with _lock:
            _num_idle += 1


def _begin_in_child() -> None:
    """Forget the threads of the process that this one was forked from."""
    global _lock, _tasks, _num_idle
    _lock, _tasks, _num_idle = threading.Lock(), SimpleQueue(), 0


_lock = threading.Lock()
_tasks: "SimpleQueue[Task]" = SimpleQueue()
_num_idle = 0
os.register_at_fork(after_in_child=_begin_in_child)
