"""Collectives that go wrong: a communicator around any other, in which one call of one rank fails, is late, is lost."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from micro.comm import Comm
from micro.flat import Layout
from micro.reducers.base import BucketState
from micro.reducers.outcome import Outcome
from micro.reducers.wrapping import WrappingReducer
from micro.requests import Reduction, over
from micro.thread_ranks import SimulatedGroup, ThreadComm

How = Literal["fails", "fails after", "is late", "is lost", "leaves", "exits"]


class InjectedError(Exception):
    """The error of the rank that a fault hits."""


class LeftError(Exception):
    """Ends a rank's work as if it had returned: the others are told of no error."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and where.

    Attributes:
        how: "fails" before the call or "fails after" it; "is late": comes when all others wait; "is lost": never
            comes, until the others give up; "leaves": the rank's work ends there without an error; "exits": its process
            does.
        rank: that it hits.
        at: the number of the call among those that the rank makes, from 0.
        op: counts calls of this kind alone: gather_rows, exchange, all_reduce or broadcast; None counts all.
    """

    how: How
    rank: int
    at: int
    op: str | None = None


class FaultyComm(Comm):
    """A communicator that calls ``inner``, which may be of any kind, and one of whose calls may go wrong.

    Attributes:
        fault: what goes wrong; None: nothing does.
        called: the calls of this rank since ``begin``, also those among some of the ranks, by kind.
    """

    def __init__(self, inner: Comm, whole: "FaultyComm | None" = None) -> None:
        super().__init__(inner.rank, inner.world_size, timed=inner.timed)
        self.inner = inner
        self._whole = whole or self
        self.begin(None)

    def begin(self, fault: Fault | None) -> None:
        """Count calls from here on, one of which may go wrong."""
        self.fault, self.called = fault, []

    def _subgroup(self, ranks: range, device: torch.device) -> Comm:
        return FaultyComm(self.inner._subgroup(ranks, device), self._whole)

    def _gather_rows(self, rows: Tensor, row: Tensor) -> None:
        self._call("gather_rows", lambda: self.inner._gather_rows(rows, row))

    def _exchange(self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]) -> None:
        self._call("exchange", lambda: self.inner._exchange(received, sent, received_sizes, sent_sizes))

    def _all_reduce_(self, x: Tensor) -> None:
        self._call("all_reduce", lambda: self.inner._all_reduce_(x))

    def _broadcast_(self, x: Tensor, source: int) -> None:
        self._call("broadcast", lambda: self.inner._broadcast_(x, source))

    def _call(self, op: str, call: Callable[[], None]) -> None:
        whole = self._whole
        whole.called.append(op)
        fault = whole.fault
        if fault is None or fault.rank != whole.rank or not _is_hit(fault, whole.called):
            call()
        elif fault.how == "fails":
            raise InjectedError(f"in {op}")
        elif fault.how == "leaves":
            raise LeftError
        elif fault.how == "exits":
            os._exit(0)
        elif fault.how == "fails after":
            call()
            raise InjectedError(f"in {op}")
        else:
            others_wait(whole.inner)
            if fault.how == "is lost":
                give_up(whole.inner)
            call()

    def __getattr__(self, name: str) -> Any:
        """Return what the inner communicator has beyond a Comm, such as a process group."""
        return getattr(self.inner, name)


def _is_hit(fault: Fault, called: list[str]) -> bool:
    if fault.op is None:
        return len(called) == fault.at + 1
    return called[-1] == fault.op and called.count(fault.op) == fault.at + 1


def others_wait(comm: Comm, delay_s: float = 0.5) -> None:
    """Return when all other ranks wait or have ended; among real ranks, after some time."""
    if not isinstance(comm, ThreadComm):
        time.sleep(delay_s)
        return
    crew = comm._memory.crew
    with crew.lock:
        crew.leave_core(comm.rank)  # as a rank that is no longer at work
    while sum(len(barrier._places) for barrier in crew.barriers) + len(crew.ended) < comm.world_size - 1:
        time.sleep(0.0002)
    with crew.lock:
        crew.make_ready([comm.rank])
    crew.wait(comm.rank)


def give_up(comm: Comm) -> None:
    """Let the time be over after which ranks that wait give up those that do not."""
    assert isinstance(comm, ThreadComm), "real ranks have a clock of their own"
    comm._memory.crew.give_up(timeout_s=600)


class FaultyRanks:
    """Simulated ranks, one of whose calls may go wrong in each run; they stay up from one run to the next."""

    def __init__(self, world_size: int) -> None:
        self.group = SimulatedGroup(world_size)
        self.comms = [FaultyComm(comm) for comm in self.group.comms]

    def run(self, work: Callable[[Comm], Any], fault: Fault | None = None) -> list[Any]:
        """Return what each rank's ``work`` gave: its result, or the error that ended it."""
        ended: list[Any] = [None] * len(self.comms)

        def recorded(inner: Comm) -> None:
            comm = self.comms[inner.rank]
            comm.begin(fault)
            try:
                ended[inner.rank] = work(comm)
            except LeftError as error:
                ended[inner.rank] = error
            except BaseException as error:
                ended[inner.rank] = error
                raise

        self.raised: BaseException | None = None
        try:
            self.group.run(recorded)
        except Exception as error:
            self.raised = error
        return ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulty(WrappingReducer):
    """A reducer that works as another, but for one call of one rank in one step: for real ranks, whose attachments make
    their communicators themselves.
    """

    fault: Fault
    step: int
    name: ClassVar[str] = "faulty"

    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        return self.reducer.start(layout, dtype, device)

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        faulty = FaultyComm(getattr(comm, "whole", comm))
        faulty.begin(self.fault if state.step == self.step else None)
        return over(faulty, self.reducer.reduction(state, grad, faulty))
