"""One exchange of a fragment: the ranks agree on it, reduce how far they have moved, and compare that."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from micro.comm.ranks import Comm
from micro.comm.requests import AllGather
from micro.drivers.lane import Lane
from micro.local.buffers import digest, exchange_buffers
from micro.local.round_stats import RoundStats
from micro.local.weights import FlatWeights
from micro.reducers.base import Reducer


def next_exchange(place: Sequence[int], comm: Comm, device: torch.device) -> int | None:
    """Return the fragment that is exchanged next, the same on all ranks; None where no rank has anything left.

    All ranks call this together, by one message of 8 (1 + 2 P) bytes for P fragments. While any rank goes on with its
    steps it says which; once all have finished, fragments that any of them has moved follow in turn.

    Args:
        place: where this rank is: the fragment that it is to exchange, -1 where it has finished; of each fragment, how
            many exchanges have ended; of each, whether this rank has moved its parameters since the last one.

    Raises:
        RuntimeError: on all ranks, where those that go on have come to different exchanges.
    """
    mine = torch.tensor(place, dtype=torch.int64, device=device)
    rows: list[list[int]] = comm.answer(AllGather(mine=mine)).tolist()  # host sync: once a round, ranks act on it
    count = len(place) // 2
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


class Exchange:
    """An exchange that has begun: it makes the differences of weights in ``vectors`` the mean updates.

    It writes nothing of the model, which may go on training.

    Args:
        vectors: they have been measured.
        buffers: copies of the model's buffers, by name, equal on all ranks at the end where the policy says so.
        place: what the exchange is of, for its statistics: round, fragment and number of steps.

    Attributes:
        age: inner steps since it began.
        exposed_s: seconds that training stood still for its begin.
    """

    def __init__(self, vectors: Sequence[FlatWeights], buffers: Mapping[str, Tensor], **place: int) -> None:
        self.vectors, self.buffers, self._place = vectors, buffers, place
        self.age, self.exposed_s = 0, 0.0
        self._stats: Future[RoundStats] = Future()
        self._device = vectors[0].start.device
        self._written: Any = None

    @classmethod
    def ended(
        cls, vectors: Sequence[FlatWeights], buffers: Mapping[str, Tensor], stats: RoundStats, *, age: int
    ) -> "Exchange":
        """Return one that has ended already, as it was saved."""
        made = cls(vectors, buffers)
        made.age = age
        made._stats.set_result(stats)
        return made

    def start(self, work: Callable[[], RoundStats], lane: Lane | None) -> None:
        """Do the work, of `reduce`, here and now or on a lane; what it raises, ``result`` raises."""

        def run() -> None:
            try:
                stats = work()
            except BaseException as error:
                self._stats.set_exception(error)
                return
            if lane is not None and self._device.type == "cuda":
                self._written = torch.cuda.current_stream(self._device).record_event()
            self._stats.set_result(stats)

        if lane is None:
            run()
        else:
            lane.put(run, [*(vector.moved for vector in self.vectors), *self.buffers.values()])

    def result(self) -> RoundStats:
        """Wait for the end; return the statistics. Raises: what ended it."""
        stats = self._stats.result()
        if self._written is not None:
            torch.cuda.current_stream(self._device).wait_event(self._written)
        return stats

    def reduce(
        self, agree: Callable[[], object], reducer: Reducer, comm: Comm, policy: str, *, keeps_own: bool
    ) -> RoundStats:
        """Make the differences of weights that the vectors hold the mean updates; return the statistics.

        Args:
            agree: called first: the ranks tell each other where they are.
            policy: of the buffers.
            keeps_own: whether parameters may change before the end, so that the difference of weights is copied.

        Raises:
            NonFiniteGradient: on all ranks; see Reducer.reduce_.
            RuntimeError: ranks have come to an exchange from different places, or with different buffers.
        """
        started = time.perf_counter()
        comm.begin_step()
        agree()
        moved = [vector.moved for vector in self.vectors]
        own = [vector.clone() for vector in moved] if keeps_own else None
        found = reducer.reduce_buckets_([vector.state for vector in self.vectors], moved, comm)
        rows = self._gathered(own, comm)
        own_norm, mean_norm, cosine, drift = _compared(rows, comm.rank)
        digests = [each for *_, each in rows]
        is_skipped = any(vector.skipped for vector in found)
        return RoundStats(
            **self._place,
            vectors=found,
            own_norm=own_norm,
            mean_norm=mean_norm,
            cosine=cosine,
            drift=drift,
            buffer_bytes=(0.0 if is_skipped else exchange_buffers(self.buffers, policy, comm, digests, self._device)),
            exchange_s=time.perf_counter() - started,
        )

    @torch.no_grad()
    def _gathered(self, own: Sequence[Tensor] | None, comm: Comm) -> list[list[float]]:
        """Return of each rank three products of its difference of weights and the mean, and its buffers' digest.

        When it returns no rank reads the global weights any more, which simulated ranks share.

        Args:
            own: each vector's difference of weights; None: it is measured again, for parameters are as they were.
        """
        products = torch.zeros(4, dtype=torch.float64, device=self._device)
        for number, vector in enumerate(self.vectors):
            mine, mean = vector.difference() if own is None else own[number], vector.moved
            products[:3] += torch.stack([mine @ mine, mean @ mean, mine @ mean]).double()
            del mine  # before the next one takes memory
        products[3] = digest(self.buffers)  # 32 bits, which a double holds
        rows: list[list[float]] = comm.answer(AllGather(mine=products)).tolist()  # host sync: once a round
        return rows


def _compared(rows: Sequence[Sequence[float]], rank: int) -> tuple[float, float, float, float]:
    """Return four of RoundStats' numbers: both norms, the cosine between them, and the ranks' drift."""
    mine_sum, mean_sum, inner, _ = rows[rank]
    apart = sum(max(one - 2 * both + update, 0.0) for one, update, both, _ in rows) / len(rows)
    own_norm, mean_norm = math.sqrt(mine_sum), math.sqrt(mean_sum)
    return own_norm, mean_norm, _share(inner, own_norm * mean_norm), _share(math.sqrt(apart), mean_norm)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 and math.isfinite(whole) else 0.0
