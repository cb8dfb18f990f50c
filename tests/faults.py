"""Requests that go wrong: a reduction around any other, in which one request of one rank fails, or its last answer."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor

from micro.comm.lockstep import SimulatedRanks
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction, Request, Sending
from micro.reducers.base import BucketState
from micro.reducers.outcome import Outcome
from micro.reducers.wrapping import WrappingReducer
from micro.values.flat import Layout

How = Literal["fails", "fails after", "leaves", "exits"]


class InjectedError(Exception):
    """The error of the rank that a fault hits."""


class LeftError(Exception):
    """Returned by a rank that leaves without reporting an error."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and where.

    Attributes:
        how: "fails" before the request or "fails after" it; "leaves": the rank's work ends there without an error;
            "exits": its process does.
        rank: that it hits.
        at: the number of the request among those that the rank makes of others, from 0.
        op: counts requests of this kind alone, by the name of their class; None counts all.
    """

    how: How
    rank: int
    at: int
    op: str | None = None


def faulty(reduction: Reduction[Any], fault: Fault | None, rank: int, called: list[str]) -> Reduction[Any]:
    """Carry on a reduction of a rank, whose requests of others are noted in ``called`` and of which one goes wrong."""
    answer: Any = None
    try:
        while True:
            request = reduction.send(answer)
            op = _call(request)
            how = fault.how if op and fault and fault.rank == rank and _is_hit(fault, [*called, op]) else None
            called += [op] if op else []
            if how == "fails":
                _fail(reduction, InjectedError(f"in {op}"))
            elif how == "leaves":
                reduction.close()
                return LeftError()
            elif how == "exits":
                os._exit(0)
            try:
                answer = yield request
            except BaseException as error:
                _fail(reduction, error)
            if how == "fails after":
                _fail(reduction, InjectedError(f"in {op}"))
    except StopIteration as end:
        return end.value


def _fail(reduction: Reduction[Any], error: BaseException) -> NoReturn:
    reduction.throw(error)
    raise error


def _call(request: Request | list[Request]) -> str:
    """Return what a request asks of other ranks; nothing where it needs none."""
    first = request[0] if isinstance(request, list) else request
    needs_others = isinstance(first, Sending) and (first.comm is None or first.comm.world_size > 1)
    return type(first).__name__ if needs_others else ""


def _is_hit(fault: Fault, called: Sequence[str]) -> bool:
    if fault.op is None:
        return len(called) == fault.at + 1
    return called[-1] == fault.op and called.count(fault.op) == fault.at + 1


class FaultyRanks:
    """Simulated ranks, one of whose requests may go wrong in each run.

    Attributes:
        called: the requests of each rank in the last run.
        raised: the error that ended it, if any.
    """

    def __init__(self, world_size: int) -> None:
        self._ranks = SimulatedRanks(world_size)

    def run(self, work: Callable[[Comm], Reduction[Any]], fault: Fault | None = None) -> list[Any]:
        """Return what each rank's ``work`` gave: its result, or the error that ended it."""
        comms = self._ranks.comms
        ended: list[Any] = [None] * len(comms)
        self.called: list[list[str]] = [[] for _ in comms]
        self.raised: BaseException | None = None

        def recorded(comm: Comm) -> Reduction[None]:
            try:
                ended[comm.rank] = yield from faulty(work(comm), fault, comm.rank, self.called[comm.rank])
            except Exception as error:
                ended[comm.rank] = error
                raise

        try:
            self._ranks.carry_out([recorded(comm) for comm in comms])
        except Exception as error:
            self.raised = error
        return ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulty(WrappingReducer):
    """A reducer that works as another, but for one request of one rank in one step."""

    fault: Fault
    step: int
    name: ClassVar[str] = "faulty"

    def start(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> BucketState:
        return self.reducer.start(layout, dtype, device)

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        fault = self.fault if state.step == self.step else None
        return faulty(self.reducer.reduction(state, grad, comm), fault, comm.rank, [])
