"""One exchange of a fragment: it begins at a step, goes on beside the next ones where there is a lane, and ends."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from micro.comm import Comm
from micro.drivers.lane import Lane
from micro.local.agreement import Place
from micro.local.buffers import exchange_
from micro.local.flat_weights import FlatWeights
from micro.local.movement import Movement
from micro.local.round_stats import RoundStats
from micro.nonfinite import NonFiniteGradient
from micro.reducers.base import Reducer


@dataclass(frozen=True, slots=True)
class Result:
    """What an exchange has given, beside the updates that the vectors hold.

    Attributes:
        buffers: of the model, equal on all ranks where the policy says so; empty where none travelled.
    """

    stats: RoundStats
    buffers: list[Tensor]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an exchange has to do: everything that it reads and writes beside the model, which goes on training.

    Attributes:
        round, fragment, num_steps: what the exchange is of, for its statistics.
        weights: the vectors; they have been measured.
        buffers, policy: copies of the model's buffers, and what becomes of them.
        place: where this rank is, which all tell each other first; None: they have done that already.
        keeps_own: whether parameters change before the end, so that the difference of weights is copied.
    """

    round: int
    fragment: int
    num_steps: int
    weights: Sequence[FlatWeights]
    buffers: list[Tensor]
    policy: str
    place: Place | None
    keeps_own: bool
    reducer: Reducer
    comm: Comm

    def do(self) -> Result:
        """Reduce the differences of weights; return the statistics.

        Raises:
            NonFiniteGradient: on all ranks; see Reducer.reduce_.
            RuntimeError: ranks have come to an exchange from different places.
        """
        started = time.perf_counter()
        moved, comm = [vector.moved for vector in self.weights], self.comm
        comm.begin_step()
        if self.place is not None:
            self.place.next_exchange(comm, moved[0].device)
        own = [vector.clone() if self.keeps_own else None for vector in moved]
        vectors = self.reducer.reduce_buckets_([vector.state for vector in self.weights], moved, comm)
        movement = Movement.of(self.weights, own, comm)
        is_skipped = any(vector.skipped for vector in vectors)
        sent = 0.0 if is_skipped else exchange_(self.buffers, self.policy, comm)
        stats = RoundStats(
            round=self.round,
            fragment=self.fragment,
            num_steps=self.num_steps,
            vectors=vectors,
            own_norm=movement.own,
            mean_norm=movement.mean,
            cosine=movement.cosine,
            drift=movement.drift,
            buffer_bytes=sent,
            exchange_s=time.perf_counter() - started,
        )
        return Result(stats, self.buffers)


class Exchange:
    """An exchange that has begun.

    Attributes:
        age: inner steps since.
        exposed_s: seconds that training stood still for its begin.
    """

    def __init__(self) -> None:
        self.age, self.exposed_s = 0, 0.0
        self._done = threading.Event()
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._written: Any = None

    @classmethod
    def ended(cls, result: Result, age: int) -> "Exchange":
        """Return an exchange that has ended, as after loading."""
        exchange = cls()
        exchange._result, exchange.age = result, age
        exchange._done.set()
        return exchange

    def begin(self, work: Work, lane: Lane | None, on_error: Callable[[BaseException], object]) -> None:
        """Do the work on the lane, or here without one.

        Args:
            on_error: called where the work ends with an error that other ranks may not have.
        """

        def run() -> None:
            try:
                self._result = work.do()
            except NonFiniteGradient as error:  # which all ranks raise
                self._error = error
            except BaseException as error:
                on_error(error)
                self._error = error
                if lane is None:
                    raise
            if lane is not None and work.weights[0].start.is_cuda:
                self._written = torch.cuda.current_stream().record_event()
            self._done.set()

        if lane is None:
            run()
        else:
            lane.put(run, [*(vector.moved for vector in work.weights), *work.buffers])

    def result(self) -> Result:
        """Wait for the end; return what it has given. Raises: what ended it."""
        self._done.wait()
        if self._written is not None:
            torch.cuda.current_stream().wait_event(self._written)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result
