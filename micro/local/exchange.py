"""One exchange of a fragment: the ranks agree on it, reduce how far they have moved, and compare that."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from micro.comm import Comm
from micro.local.round_stats import RoundStats
from micro.local.weights import FlatWeights
from micro.reducers.base import Reducer
from micro.requests import AllGather, AllReduce, Broadcast


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is when it comes to an exchange.

    Attributes:
        fragment: that it is to exchange; None: it has finished, and takes part in what the others exchange.
        num_rounds: of each fragment, how many exchanges have ended.
        moved: of each fragment, whether this rank has moved its parameters since its last exchange.
    """

    fragment: int | None
    num_rounds: Sequence[int]
    moved: Sequence[bool]

    def next_exchange(self, comm: Comm, device: torch.device) -> int | None:
        """Return the fragment that is exchanged next, the same on all ranks; None where no rank has anything left.

        All ranks call this together, by one message of 8 (1 + 2 P) bytes for P fragments. While any rank goes on with
        its steps it says which; once all have finished, fragments that any of them has moved follow in turn.

        Raises:
            RuntimeError: on all ranks, where those that go on have come to different exchanges.
        """
        own = [-1 if self.fragment is None else self.fragment, *self.num_rounds, *map(int, self.moved)]
        mine = torch.tensor(own, dtype=torch.int64, device=device)
        rows: list[list[int]] = comm.answer(AllGather(mine=mine)).tolist()  # host sync: once a round, ranks act on it
        count = len(self.num_rounds)
        going_on = [rank for rank, row in enumerate(rows) if row[0] >= 0]
        if not going_on:
            return next((each for each in range(count) if any(row[1 + count + each] for row in rows)), None)
        first, fragment = going_on[0], rows[going_on[0]][0]

        def words(rank: int) -> str:
            which = f" of fragment {rows[rank][0]}" if rows[rank][0] >= 0 else ""
            return f"rank {rank} is at round {rows[rank][1 + fragment]}{which}"

        for rank, row in enumerate(rows):
            if row[0] not in (fragment, -1) or row[1 + fragment] != rows[first][1 + fragment]:
                raise RuntimeError(f"ranks must exchange at the same place: {words(first)}, {words(rank)}")
        return fragment


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an exchange has to do: everything that it reads and writes beside the model, which goes on training.

    Attributes:
        round, fragment, num_steps: what the exchange is of, for its statistics.
        weights: the vectors; they have been measured.
        buffers, policy: copies of the model's buffers, which become equal on all ranks where the policy says so.
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

    def do(self, reducer: Reducer, comm: Comm) -> RoundStats:
        """Make the differences of weights that the vectors hold the mean updates; return the statistics.

        Raises:
            NonFiniteGradient: on all ranks; see Reducer.reduce_.
            RuntimeError: ranks have come to an exchange from different places.
        """
        started = time.perf_counter()
        moved = [vector.moved for vector in self.weights]
        comm.begin_step()
        if self.place is not None:
            self.place.next_exchange(comm, moved[0].device)
        own = [vector.clone() if self.keeps_own else None for vector in moved]
        vectors = reducer.reduce_buckets_([vector.state for vector in self.weights], moved, comm)
        own_norm, mean_norm, cosine, drift = self._compared(own, comm)
        is_skipped = any(vector.skipped for vector in vectors)
        return RoundStats(
            round=self.round,
            fragment=self.fragment,
            num_steps=self.num_steps,
            vectors=vectors,
            own_norm=own_norm,
            mean_norm=mean_norm,
            cosine=cosine,
            drift=drift,
            buffer_bytes=0.0 if is_skipped else self._exchange_buffers(comm),
            exchange_s=time.perf_counter() - started,
        )

    @torch.no_grad()
    def _compared(self, own: Sequence[Tensor | None], comm: Comm) -> tuple[float, float, float, float]:
        """Return the last four of RoundStats' numbers: both norms, the cosine between them, and the ranks' drift.

        When it returns no rank reads the global weights any more, which simulated ranks share.

        Args:
            own: each vector's difference of weights; None where the parameters are as they were when it was measured.
        """
        products = torch.zeros(3, dtype=torch.float64, device=self.weights[0].start.device)
        for vector, moved in zip(self.weights, own, strict=True):
            for mine, mean in vector.pairs(moved):
                products += torch.stack([(mine @ mine).double(), (mean @ mean).double(), (mine @ mean).double()])
        rows = comm.answer(AllGather(mine=products)).tolist()  # host sync: once a round, for the record
        mine_sum, mean_sum, inner = rows[comm.rank]
        apart = sum(max(one - 2 * both + update, 0.0) for one, update, both in rows) / len(rows)
        own_norm, mean_norm = math.sqrt(mine_sum), math.sqrt(mean_sum)
        return own_norm, mean_norm, _share(inner, own_norm * mean_norm), _share(math.sqrt(apart), mean_norm)

    @torch.no_grad()
    def _exchange_buffers(self, comm: Comm) -> float:
        """Make the buffers equal on all ranks, bit for bit; return the bytes that this rank sent."""
        if self.policy == "own" or comm.world_size == 1:
            return 0.0
        comm.begin_step()
        for buffer in self.buffers:
            if self.policy == "mean" and (buffer.is_floating_point() or buffer.is_complex()):
                buffer.copy_(comm.answer(AllReduce(mine=buffer.clone())) / comm.world_size)
            else:
                comm.answer(Broadcast(mine=buffer, source=0))
        return sum(comm.traffic.num_bytes.values())


class UnderWay:
    """An exchange that has begun.

    Attributes:
        buffers: of the model, equal on all ranks at the end where the policy says so; empty where none travel.
        age: inner steps since.
        exposed_s: seconds that training stood still for its begin.
    """

    def __init__(self, buffers: list[Tensor], age: int = 0) -> None:
        self.buffers, self.age, self.exposed_s = buffers, age, 0.0
        self.stats: Future[RoundStats] = Future()
        self._written: Any = None

    def run(self, work: Callable[[], RoundStats], *, notes_stream: bool) -> None:
        """Do the work here and now.

        Args:
            notes_stream: whether who asks for the result does so on another stream of the device.
        """
        try:
            stats = work()
        except BaseException as error:
            self.stats.set_exception(error)
            return
        if notes_stream:
            self._written = torch.cuda.current_stream().record_event()
        self.stats.set_result(stats)

    def result(self) -> RoundStats:
        """Wait for the end; return the statistics. Raises: what ended it."""
        stats = self.stats.result()
        if self._written is not None:
            torch.cuda.current_stream().wait_event(self._written)
        return stats


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 and math.isfinite(whole) else 0.0
