"""Rounds of messages: reductions that are under way at the same time share them, so their latencies are not in series.

A reduction that requests something is left there, and another one goes on. What all of them wait for is then sent at
once: one round. With c requests a bucket, B buckets take c rounds where all are there from the beginning, and B + c - 1
where they come one by one during backward, in place of B c one after the other. Which messages share a round follows
from the order of the buckets and from what all ranks know, never from time: it is the same on all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from micro.comm import Comm, SoloComm
from micro.peer_failures import Pending
from micro.requests import AllReduce, Call, Reduction, Request, carried_out
from micro.shared_messages import Done, Message, start_together
from micro.spans import Seconds

T = TypeVar("T")
Reduce = Callable[[Comm], Reduction[T]]
"""Begins a reduction over the ranks that it is given."""


class _View(SoloComm):
    """The ranks of ``comm`` as one reduction sees them; its clock stands still while it waits for a round.

    Attributes:
        whole: those ranks.
        away: how long the clock has stood still.
    """

    def __init__(self, comm: Comm) -> None:
        Comm.__init__(self, comm.rank, comm.world_size, timed=comm.timed)
        self.traffic = comm.traffic
        self.away: Seconds = 0.0
        self.whole = comm

    def now(self, device: torch.device) -> Seconds:
        """Return a time, without those in which others ran; see Comm."""
        return super().now(device) - self.away

    def alike(self, work: Callable[[], T]) -> T:
        """Return what ``work`` makes of values that all ranks hold alike; see Comm."""
        return self.whole.alike(work)

    def fill_alike_(self, out: Tensor, work: Callable[[], T]) -> T:
        """Write into ``out`` what all ranks get alike; see Comm."""
        return self.whole.fill_alike_(out, work)


class Begun(Generic[T]):
    """A reduction that was begun; to call it sends rounds until it is done, and returns what it returned."""

    def __init__(self, rounds: "Rounds", reduce: Reduce[T], comm: Comm) -> None:
        self._rounds, self._comm, self._view = rounds, comm, _View(comm)
        self._reduction: Reduction[T] = reduce(self._view)
        self._calls: list[Call] = []
        self._is_list = self._has_ended = False
        self._last: tuple[Pending, Tensor] | None = None
        self._result: list[T] = []
        self._left: Seconds = 0.0
        self._go_on(None)

    @property
    def messages(self) -> list[Message]:
        """What it waits for in the next round."""
        return [call.message for call in self._calls if call.message is not None]

    @property
    def is_done(self) -> bool:
        """Whether no round is needed any more; the same on all ranks, but for one whose last sum is under way."""
        return self._has_ended or (self._last is not None and self._last[0].is_completed())

    def __call__(self) -> T:
        """Return the outcome."""
        if self._last is not None:
            self._receive_last(*self._last)
        while not self._has_ended:
            self._rounds.advance()
        return self._result.pop()

    def receive(self) -> None:
        """Go on with the answers of a round that was received."""
        messages, calls, self._calls = self.messages, self._calls, []
        waited: Seconds = 0.0
        for message in messages:
            waited = waited + message.waited
            self._view.traffic.num_shared += message.is_shared
        for call in calls:
            call.count(self._view)
        self._return(messages[0].device, waited)
        answers = [call.take() for call in calls]
        self._go_on(answers if self._is_list else answers[0])

    def close(self) -> None:
        """End it where it is."""
        self._reduction.close()
        self._calls, self._last, self._has_ended = [], None, True

    def _go_on(self, answer: Any) -> None:
        """Run until the next message or the end."""
        try:
            while not self._calls and self._last is None:
                answer = self._begin(self._reduction.send(answer))
        except StopIteration as end:
            self._result.append(end.value)
            self._has_ended = True

    def _begin(self, request: Request | list[Request]) -> Any:
        """Return the answer to a request that needs no message; note the messages that another one needs."""
        self._is_list = isinstance(request, list)
        requests = request if isinstance(request, list) else [request]
        if isinstance(request, AllReduce) and request.last:
            pending = self._comm.start_sum(request.mine) if self._comm.world_size > 1 else None
            if pending is not None:
                request.call(self._comm).count(self._view)
                self._last, self._left = (pending, request.mine), self._view.now(request.mine.device)
                return None
        calls = [each.call(each.comm or self._comm) for each in requests]
        messages = [call.message for call in calls if call.message is not None]
        if messages:
            self._calls, self._left = calls, self._view.now(messages[0].device)
            return None
        for call in calls:
            call.count(self._view)
        answers = [call.take() for call in calls]
        return answers if self._is_list else answers[0]

    def _receive_last(self, pending: Pending, total: Tensor) -> None:
        """Wait for the sum that ends the reduction, and go on to the end."""
        self._last = None
        started = self._view.now(total.device)
        pending.wait()
        self._return(total.device, self._view.now(total.device) - started)
        self._go_on(total)

    def _return(self, device: torch.device, waited: Seconds) -> None:
        """Set the clock to where it stood, but for the time that messages took."""
        self._view.away = self._view.away + (self._view.now(device) - self._left - waited)
        self._view.traffic.elapsed = self._view.traffic.elapsed + waited


class Rounds:
    """The reductions of one group of ranks that are under way; all ranks begin them in the same order.

    Attributes:
        num_rounds: how many rounds were sent so far.
    """

    def __init__(self) -> None:
        self.num_rounds = 0
        self._under_way: list[Begun[Any]] = []
        self._sent: Sequence[Begun[Any]] = ()
        self._messages: Sequence[Message] = ()
        self._wait: Done = _nothing
        self._took: Seconds = 0.0  # to start what was sent

    def begin(self, reduce: Reduce[T], comm: Comm, *, shares: bool = True) -> Begun[T]:
        """Run a reduction up to its first message; it goes on with the rounds that follow.

        Args:
            shares: False: it is carried out at once, each message by itself.
        """
        begun = Begun(self, reduce if shares else partial(_at_once, reduce, comm), comm)
        self._under_way.append(begun)
        return begun

    def advance(self) -> None:
        """Wait for the round that was sent; send the next: what those wait for that have come to a message."""
        self._receive()
        self._under_way = [each for each in self._under_way if each.messages or not each.is_done]
        self._sent = [each for each in self._under_way if each.messages]
        self._messages = [message for each in self._sent for message in each.messages]
        if self._messages:
            self.num_rounds += 1
            started = self._messages[0].now()
            self._wait = start_together(self._messages)
            self._took = self._messages[0].now() - started

    def abandon(self) -> None:
        """End all reductions where they are: nothing more is sent."""
        under_way, self._under_way = self._under_way, []
        self._sent, self._messages, self._wait = (), (), _nothing
        for each in under_way:
            each.close()

    def _receive(self) -> None:
        sent, messages, wait = self._sent, self._messages, self._wait
        self._sent, self._messages, self._wait = (), (), _nothing
        if not messages:
            return
        started = messages[0].now()
        wait()
        took = self._took + messages[0].now() - started
        for message in messages:
            message.waited = took * (1 / len(messages))
        for each in sent:
            each.receive()


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


def _nothing() -> None:
    """Wait for nothing."""
