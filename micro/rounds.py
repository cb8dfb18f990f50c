"""Rounds of messages: reductions that are under way at the same time share them, so their latencies are not in series.

A reduction that requests something is left there, and another one goes on. What all of them wait for is then sent at
once: one round. With c requests a bucket, B buckets take c rounds where all are there from the beginning, and B + c - 1
where they come one by one during backward, in place of B c one after the other. Which messages share a round follows
from the order of the buckets and from what all ranks know, never from time: it is the same on all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from micro.comm import Comm, Started
from micro.requests import AllReduce, Reduction, Request, carried_out, named
from micro.spans import Seconds

T = TypeVar("T")
Reduce = Callable[[Comm], Reduction[T]]
"""Begins a reduction over the ranks that it is given."""


class UnderWay(Generic[T]):
    """A reduction that was begun; to call it sends rounds until it is done, and returns what it returned.

    Attributes:
        comm: over which ranks.
        requests: what it waits for in the next round.
    """

    def __init__(self, rounds: "Rounds", reduce: Reduce[T], comm: Comm) -> None:
        self.comm, self._rounds, self._own = comm, rounds, comm.for_reduction()
        self.requests: list[Request] = []
        self._is_list = self._has_ended = False
        self._last: Started | None = None
        self._result: list[T] = []
        self._reduction: Reduction[T] = reduce(self._own)
        self._go_on(None)

    @property
    def is_done(self) -> bool:
        """Whether no round is needed any more; the same on all ranks, but for one whose last sum is under way."""
        return self._has_ended or (self._last is not None and self._last.is_completed())

    def __call__(self) -> T:
        """Return the outcome."""
        if self._last is not None:
            self._receive_last(self._last)
        while not self._has_ended:
            self._rounds.advance()
        return self._result.pop()

    def receive(self, answers: list[Any], waited: Seconds) -> None:
        """Go on with the answers of a round, for which this reduction has waited so long."""
        self._own.come_back(self.requests[0].device, waited)
        self.requests = []
        self._go_on(answers if self._is_list else answers[0])

    def close(self) -> None:
        """End it where it is."""
        self._reduction.close()
        self.requests, self._last, self._has_ended = [], None, True

    def _go_on(self, answer: Any) -> None:
        """Run until the next message or the end."""
        try:
            while not self.requests and self._last is None:
                answer = self._begin(self._reduction.send(answer))
        except StopIteration as end:
            self._result.append(end.value)
            self._has_ended = True

    def _begin(self, request: Request | list[Request]) -> Any:
        """Return the answer to a request that needs no message; note one that needs a round."""
        self._is_list = isinstance(request, list)
        requests = named(request, self._own)
        if all(each.is_local for each in requests):
            answers = self.comm.start(requests).answers()
            return answers if self._is_list else answers[0]
        self._own.leave(requests[0].device)
        if isinstance(request, AllReduce) and request.last:
            self._last, self.requests = self.comm.start(requests), []
            self._device = request.device
        else:
            self.requests = requests
        return None

    def _receive_last(self, last: Started) -> None:
        """Wait for the sum that ends the reduction, and go on to the end."""
        self._last = None
        started = self._own.now(self._device)
        (total,) = last.answers()
        self._own.come_back(self._device, self._own.now(self._device) - started)
        self._go_on(total)


class Rounds:
    """The reductions of one group of ranks that are under way; all ranks begin them in the same order.

    Attributes:
        num_rounds: how many rounds were sent so far.
    """

    def __init__(self) -> None:
        self.num_rounds = 0
        self._under_way: list[UnderWay[Any]] = []
        self._sent: list[UnderWay[Any]] = []
        self._started: Started | None = None
        self._took: Seconds = 0.0  # to start what was sent

    def begin(self, reduce: Reduce[T], comm: Comm, *, shares: bool = True) -> UnderWay[T]:
        """Run a reduction up to its first message; it goes on with the rounds that follow.

        Args:
            shares: False: it is carried out at once, each message by itself.
        """
        begun = UnderWay(self, reduce if shares else partial(_at_once, reduce, comm), comm)
        self._under_way.append(begun)
        return begun

    def advance(self) -> None:
        """Wait for the round that was sent; send the next: what those wait for that have come to a message."""
        self._receive()
        self._under_way = [each for each in self._under_way if each.requests or not each.is_done]
        self._sent = [each for each in self._under_way if each.requests]
        if self._sent:
            self.num_rounds += 1
            comm, device = self._sent[0].comm, self._sent[0].requests[0].device
            began = comm.now(device)
            self._started = comm.start([request for each in self._sent for request in each.requests])
            self._took = comm.now(device) - began

    def abandon(self) -> None:
        """End all reductions where they are: nothing more is sent."""
        under_way, self._under_way = self._under_way, []
        self._sent, self._started = [], None
        for each in under_way:
            each.close()

    def _receive(self) -> None:
        sent, started = self._sent, self._started
        self._sent, self._started = [], None
        if started is None:
            return
        comm, device = sent[0].comm, sent[0].requests[0].device
        began = comm.now(device)
        answers = iter(started.answers())
        took = self._took + comm.now(device) - began
        num_requests = sum(len(each.requests) for each in sent)
        for each in sent:
            own = [next(answers) for _ in each.requests]
            each.receive(own, took * (len(own) / num_requests))


def all_together(reduces: Sequence[Reduce[T]], comms: Iterator[Comm], *, shares: bool) -> list[T]:
    """Return what all reductions return, in their order; they share rounds, where they can.

    Args:
        comms: the ranks, for each reduction in turn: the traffic that they have then is that of the reduction.
    """
    rounds = Rounds()
    try:
        begun = [rounds.begin(reduce, comm, shares=shares) for reduce, comm in zip(reduces, comms, strict=False)]
        return [each() for each in begun]
    except BaseException:
        rounds.abandon()
        raise


def _at_once(reduce: Reduce[T], comm: Comm, _: Comm) -> Reduction[T]:
    """Return a reduction that requests nothing: ``reduce`` is carried out over ``comm`` where it begins."""
    yield from ()
    return carried_out(reduce(comm), comm)
