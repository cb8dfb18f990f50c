"""The loop that runs reductions: each runs to its next request, waits for the answer, and continues.

Concurrent reductions share rounds of messages, so their latencies do not add up: all pending requests are sent
together. With c requests per bucket, B buckets take c rounds if all start together, and B + c - 1 if they become ready
one by one in backward, instead of B c. The messages of a round depend on the order of buckets and on data that all
ranks have, never on timing, so they are equal on all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from micro.comm.ranks import Comm, Started
from micro.comm.requests import AllReduce, Once, Reduction, ToHost
from micro.values.finite import read

T = TypeVar("T")
Reduce = Callable[[Comm], Reduction[T]]
"""Begins a reduction over the ranks that it is given."""


class Running(Generic[T]):
    """A reduction under way.

    Attributes:
        comm: the ranks that it asks where its requests name none, and its clock.
        requests: what it waits for, and does not answer itself; empty once it has ended.
        needs_round: whether it waits for more than its last sum, or what it reads last of its accelerator.
        reads: whether it waits for its accelerator alone.
        last: its last sum, which travels alone and for which no round waits.
        result: what it returned, once ``has_ended``.
    """

    result: T

    def __init__(self, reduction: Reduction[T], comm: Comm) -> None:
        self.comm, self._reduction = comm, reduction
        self.requests: list[Any] = []
        self.last: Started | None = None
        self.has_ended = self.needs_round = self.reads = self._is_list = False

    def advance(self, answers: list[Any] | None = None) -> None:
        """Run to the next request that it does not answer itself, or to the end.

        Args:
            answers: to what it has requested; None at first.
        """
        clock = self.comm.clock
        answer = answers if answers is None or self._is_list else answers[0]
        if answers is not None:
            clock.since = clock.instant()
        try:
            while True:
                request = self._reduction.send(answer)
                self._is_list = isinstance(request, list)
                self.requests = request if isinstance(request, list) else [request]
                needs_others = False
                for each in self.requests:
                    comm = each.comm = each.comm or self.comm
                    shares = comm.shares_memory if isinstance(each, Once) else comm.world_size > 1
                    needs_others |= shares or isinstance(each, ToHost)
                if needs_others:
                    first = self.requests[0]
                    self.needs_round, self.reads = not first.last, isinstance(first, ToHost)
                    break
                answer = [each.alone() for each in self.requests] if self._is_list else self.requests[0].alone()
        except StopIteration as end:
            self.result = end.value
            self._end()
        at = clock.instant()
        clock.ran, clock.since = clock.ran + (at - clock.since), at

    @property
    def is_done(self) -> bool:
        """Whether it can end at once; the same on all ranks, but for one whose last sum is under way."""
        return self.has_ended or (self.last is not None and self.requests[0].mine.is_cpu and self.last.is_completed())

    def close(self, error: BaseException | None = None) -> None:
        """End it where it is; by ``error``, which is raised there so that it knows why, if there is one."""
        if error is not None and not self.has_ended:
            with suppress(Exception, type(error)):  # this one, as it should
                self._reduction.throw(error)
        self._reduction.close()
        self._end()

    def _end(self) -> None:
        self.requests, self.has_ended, self.needs_round, self.reads = [], True, False, False


class Loop:
    """The reductions of one group of ranks that are under way; all ranks begin them in the same order.

    Attributes:
        num_rounds: how many rounds were sent so far.
    """

    def __init__(self) -> None:
        self.num_rounds = 0
        self._running: list[Running[Any]] = []
        self._sent: list[Running[Any]] = []
        self._started: Started | None = None

    def begin(self, reduce: Reduce[T], comm: Comm, *, shares: bool = True) -> Running[T]:
        """Run a reduction over ``comm`` up to its first message; it goes on with the rounds that follow.

        Args:
            shares: False: it is carried out to its end, each message by itself.
        """
        own = comm.for_reduction()
        running = Running(reduce(own), own)
        self._running.append(running)
        if shares:
            self._go_on(running)
        else:
            _run(running)
        return running

    def advance(self) -> bool:
        """Wait for the round that was sent; send the next: what those wait for that have come to a message.

        Returns:
            whether there was one of both.
        """
        received, started, self._sent, self._started = self._sent, self._started, [], None
        if started is not None:
            answers = iter(waited_for(received, started.answers))
            for each in received:
                self._go_on(each, list(islice(answers, len(each.requests))))
        while True:
            sent, requests, reading = list[Running[Any]](), list[Any](), list[Running[Any]]()
            for each in self._running:
                if each.needs_round:
                    (reading if each.reads else sent).append(each)
                    requests += each.requests
            if not reading:
                break
            self._read(reading)
        if sent:
            self.num_rounds += 1
            self._sent, self._started = sent, waited_for(sent, partial(requests[0].comm.start, requests))
        return started is not None or bool(sent)

    def finish(self, running: Running[T]) -> T:
        """Send rounds until a reduction has ended, and let go of it; return what it returned."""
        self._receive_last(running)
        while not running.has_ended:
            if not self.advance():
                for each in self._running:
                    self._receive_last(each)
                self._read([each for each in self._running if each.requests])  # what all need at their ends
        self._running.remove(running)
        return running.result

    def abandon(self) -> None:
        """End all reductions where they are: nothing more is sent."""
        running, self._running, self._sent, self._started = self._running, [], [], None
        for each in running:
            each.close()

    def _go_on(self, running: Running[Any], answers: list[Any] | None = None) -> None:
        """Let a reduction go on to its next message, which is started if it is its last sum."""
        running.advance(answers)
        while running.requests and isinstance(running.requests[0], Once):  # ranks that share memory: no message either
            running.advance(_answers(running))
        if running.requests and isinstance(running.requests[0], AllReduce) and running.requests[0].last:
            running.last = running.requests[0].comm.start(running.requests)

    def _receive_last(self, running: Running[Any]) -> None:
        if running.last is not None:
            started, running.last = running.last, None
            self._go_on(running, waited_for([running], started.answers))

    def _read(self, reading: Sequence[Running[Any]]) -> None:
        if reading:
            for each, answers in zip(reading, numbers_for(reading), strict=True):
                self._go_on(each, answers)


def waited_for(running: Sequence[Running[Any]], answer: Callable[[], T]) -> T:
    """Return what ``answer`` returns, for which these reductions wait: each for its share of the time."""
    instant = running[0].comm.clock.instant
    began = instant()
    answers = answer()
    share = (instant() - began) / len(running)
    for each in running:
        each.comm.clock.waited += share
    return answers


def numbers_for(reading: Sequence[Running[Any]]) -> list[list[Any]]:
    """Return the answers to reductions that need numbers of their accelerator, for which the host waits once."""
    numbers = [number for each in reading for request in each.requests for number in request.numbers]
    found = iter(waited_for(reading, lambda: read(numbers)))
    return [[list(islice(found, len(request.numbers))) for request in each.requests] for each in reading]


def carried_out(reduction: Reduction[T], comm: Comm) -> T:
    """Return what a reduction returns; its requests are carried out, one after the other, as they come."""
    running = Running(reduction, comm)
    try:
        return _run(running)
    except BaseException as error:
        running.close(error)
        raise


def _run(running: Running[T]) -> T:
    running.advance()
    while running.requests:
        running.advance(_answers(running))
    return running.result


def _answers(running: Running[Any]) -> list[Any]:
    """Return the answers to one reduction alone."""
    if running.reads:
        return numbers_for([running])[0]
    return waited_for([running], lambda: running.requests[0].comm.start(running.requests).answers())


def all_together(reduces: Sequence[Reduce[T]], comms: Iterator[Comm], *, shares: bool) -> list[T]:
    """Return what all reductions return, in their order; they share rounds, where they can.

    Args:
        comms: the ranks, for each reduction in turn: the traffic that they have then is that of the reduction.
    """
    loop = Loop()
    try:
        begun = [loop.begin(reduce, comm, shares=shares) for reduce, comm in zip(reduces, comms, strict=False)]
        return [loop.finish(each) for each in begun]
    finally:
        loop.abandon()
