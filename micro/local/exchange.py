"""One exchange of a fragment: the ranks agree on the fragment, then reduce and compare their weight differences."""

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
    """Return the fragment that is exchanged next, equal on all ranks; None if nothing is left to exchange.

    A collective, with one message of 8 (1 + 2 P) bytes for P fragments. Ranks that still train determine the fragment;
    once all have finished, the fragments that any rank has changed follow in order.

    Args:
        place: this rank's position: the fragment to exchange, -1 if it has finished; for each fragment, the number of
            finished exchanges; for each, whether this rank has changed its parameters since the last one.

    Raises:
        RuntimeError: on all ranks, if ranks that still train have reached different exchanges.
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
    """An exchange that has begun: it replaces the weight differences in ``vectors`` by the mean updates.

    It does not write to the model, which may continue training.

    Args:
        vectors: hold the weight differences.
        buffers: copies of the model's buffers, by name, which become equal on all ranks if the policy requires it.
        place: round, fragment and number of steps, for the statistics.

    Attributes:
        age: inner steps since it began.
        exposed_s: seconds for which its start blocked training.
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
        """Return a finished exchange, from a saved state."""
        made = cls(vectors, buffers)
        made.age = age
        made._stats.set_result(stats)
        return made

    def start(self, work: Callable[[], RoundStats], lane: Lane | None) -> None:
        """Run ``work`` now, or on a lane if there is one; its exception is raised by ``result``."""

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
        """Wait for the end and return the statistics, or raise the exception of the work."""
        stats = self._stats.result()
        if self._written is not None:
            torch.cuda.current_stream(self._device).wait_event(self._written)
        return stats

    def reduce(
        self, agree: Callable[[], object], reducer: Reducer, comm: Comm, policy: str, *, keeps_own: bool
    ) -> RoundStats:
        """Replace the weight differences in the vectors by the mean updates; return the statistics.

        Args:
            agree: called first; the ranks compare their positions.
            policy: for the buffers.
            keeps_own: whether to copy the differences, because parameters may change before the end.

        Raises:
            NonFiniteGradient: on all ranks; see Reducer.reduce_.
            RuntimeError: ranks have reached different exchanges, or have different buffers.
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
        """Return for each rank three dot products of its difference and the mean, and its buffers' digest.

        After it, no rank reads the global weights any more, which simulated ranks share.

        Args:
            own: each vector's difference; None: compute it again, as the parameters have not changed.
        """
        products = torch.zeros(4, dtype=torch.float64, device=self._device)
        for number, vector in enumerate(self.vectors):
            mine, mean = vector.difference() if own is None else own[number], vector.moved
            products[:3] += torch.stack([mine @ mine, mean @ mean, mine @ mean]).double()
            del mine  # free it before the next is allocated
        products[3] = digest(self.buffers)  # 32 bits fit into a double
        rows: list[list[float]] = comm.answer(AllGather(mine=products)).tolist()  # host sync: once a round
        return rows


def _compared(rows: Sequence[Sequence[float]], rank: int) -> tuple[float, float, float, float]:
    """Return four fields of RoundStats: both norms, the cosine, and the drift."""
    mine_sum, mean_sum, inner, _ = rows[rank]
    apart = sum(max(one - 2 * both + update, 0.0) for one, update, both, _ in rows) / len(rows)
    own_norm, mean_norm = math.sqrt(mine_sum), math.sqrt(mean_sum)
    return own_norm, mean_norm, _share(inner, own_norm * mean_norm), _share(math.sqrt(apart), mean_norm)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 and math.isfinite(whole) else 0.0
