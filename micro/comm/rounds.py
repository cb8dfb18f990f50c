"""Rounds of messages: reductions that are under way at the same time share them, so their latencies are not in series.

A reduction that requests something is left there, and another one goes on. What all of them wait for is then sent at
once: one round. With c requests a bucket, B buckets take c rounds where all are there from the beginning, and B + c - 1
where they come one by one during backward, in place of B c one after the other. Which messages share a round follows
from the order of the buckets and from what all ranks know, never from time: it is the same on all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from micro.comm.ranks import Comm, Started
from micro.comm.requests import AllReduce, Once, Reduction, Running, carried_out, read_together

T = TypeVar("T")
Reduce = Callable[[Comm], Reduction[T]]
"""Begins a reduction over the ranks that it is given."""


class UnderWay(Running[T]):
    """A reduction that was begun; to call it sends rounds until it is done, and returns what it returned.

    Attributes:
        needs_rounds: whether it waits for more than its last sum, or what it reads last of its accelerator.
    """

    needs_rounds: bool

    def __init__(self, rounds: "Rounds", reduction: Reduction[T], ranks: Comm, own: Comm) -> None:
        super().__init__(reduction, own)
        self.ranks, self._rounds = ranks, rounds
        self.last: Started | None = None  # what it waits for and nothing follows: no round waits for that
        self.go_on()

    @property
    def is_done(self) -> bool:
        """Whether it can end at once; the same on all ranks, but for one whose last sum is under way."""
        return self.has_ended or (self.last is not None and self.requests[0].mine.is_cpu and self.last.is_completed())

    def go_on(self, answers: list[Any] | None = None, waited: float = 0.0, at: float | None = None) -> float:
        """Run to the next message, which is started if it is the last, or to the end."""
        left = super().go_on(answers, waited, at)
        while self.requests and isinstance(self.requests[0], Once):  # ranks that share memory: no message either
            left = super().go_on(self.ranks.start(self.requests).answers())
        if self.requests and isinstance(self.requests[0], AllReduce) and self.requests[0].last:
            self.last = self.ranks.start(self.requests)
        self.needs_rounds = bool(self.requests) and not self.requests[0].last
        return left

    def receive_last(self) -> None:
        """Go on with the last sum, if there is one."""
        if self.last is not None:
            began = self.comm.instant()
            answers, self.last = self.last.answers(), None
            at = self.comm.instant()
            self.go_on(answers, at - began, at)

    def __call__(self) -> T:
        """Return the outcome."""
        self.receive_last()
        while not self.has_ended:
            if self.needs_rounds:
                self._rounds.advance()
            else:
                self._rounds.read_last()
        return self.result


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
        self._took: float = 0.0  # to start what was sent

    def begin(self, reduce: Reduce[T], comm: Comm, *, shares: bool = True) -> UnderWay[T]:
        """Run a reduction up to its first message; it goes on with the rounds that follow.

        Args:
            shares: False: it is carried out at once, each message by itself.
        """
        own = comm.for_reduction()
        begun = UnderWay(self, reduce(own) if shares else _at_once(reduce(own), own), comm, own)
        self._under_way.append(begun)
        return begun

    def advance(self) -> None:
        """Wait for the round that was sent; send the next: what those wait for that have come to a message."""
        began = self._receive(self._started) if self._started is not None else None
        while reading := [each for each in self._under_way if each.needs_rounds and each.reads]:
            began = _read(reading)
        left: list[UnderWay[Any]] = []
        requests: list[Any] = []
        for each in self._under_way:
            if not each.has_ended:
                left.append(each)
            if each.needs_rounds:
                self._sent.append(each)
                requests += each.requests
        self._under_way = left
        if requests:
            self.num_rounds += 1
            comm = self._sent[0].comm
            began = comm.instant() if began is None else began
            self._started = self._sent[0].ranks.start(requests)
            self._took = comm.instant() - began

    def read_last(self) -> None:
        """Send the rounds that any needs, then read at once what all need of their accelerator at their ends."""
        while any(each.needs_rounds for each in self._under_way):
            self.advance()
        for each in self._under_way:
            each.receive_last()
        _read([each for each in self._under_way if each.requests])

    def _receive(self, started: Started) -> float:
        """Let those go on whose messages were sent; return when the last of them stopped."""
        sent, self._sent, self._started = self._sent, [], None
        began = sent[0].comm.instant()
        answers = started.answers()
        at = sent[0].comm.instant()
        share = (self._took + (at - began)) * (1 / len(answers))
        for each in sent:
            own, answers = answers[: len(each.requests)], answers[len(each.requests) :]
            at = each.go_on(own, share * len(own), at)
        return at

    def abandon(self) -> None:
        """End all reductions where they are: nothing more is sent."""
        under_way, self._under_way = self._under_way, []
        self._sent, self._started = [], None
        for each in under_way:
            each.close()


def _read(reading: Sequence[UnderWay[Any]]) -> float:
    """Let those go on that need numbers of their accelerator, for which the host waits once; return when."""
    began = reading[0].comm.instant()
    answers = read_together([each.requests[0] for each in reading])
    at = reading[0].comm.instant()
    share = (at - began) * (1 / len(reading))
    for each, answer in zip(reading, answers, strict=True):
        at = each.go_on([answer], share, at)
    return at


def all_together(reduces: Sequence[Reduce[T]], comms: Iterator[Comm], *, shares: bool) -> list[T]:
    """Return what all reductions return, in their order; they share rounds, where they can.

    Args:
        comms: the ranks, for each reduction in turn: the traffic that they have then is that of the reduction.
    """
    rounds = Rounds()
    try:
        begun = [rounds.begin(reduce, comm, shares=shares) for reduce, comm in zip(reduces, comms, strict=False)]
        return [each() for each in begun]
    finally:
        rounds.abandon()


def _at_once(reduction: Reduction[T], comm: Comm) -> Reduction[T]:
    """Return a reduction that requests nothing: ``reduction`` is carried out where it begins."""
    yield from ()
    return carried_out(reduction, comm)
