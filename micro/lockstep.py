"""n ranks in one process: each runs to its next request, then all of them get the answers.

No rank has a thread of its own, none waits, and what follows from what all hold alike is computed once. Where ranks
differ in what they request there is an error that names them.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from micro.comm import Comm, Started
from micro.peer_failures import PeerError, words_of_failure
from micro.rank_threads import ask, cores_for, in_thread
from micro.requests import (
    AllGather,
    AllGatherLists,
    AllReduce,
    AllToAll,
    Broadcast,
    Fill,
    Once,
    Reduction,
    Request,
    Running,
)
from micro.spans import Seconds

T = TypeVar("T")
BLOCK = 2**16  # elements of a sum that are added up at a time: they stay in a core's cache


class SimulatedComm(Comm):
    """One of n simulated ranks, or of some of them.

    Attributes:
        members: which of all ranks they are.
    """

    def __init__(self, rank: int, members: range) -> None:
        super().__init__(rank, len(members))
        self.members, self.shares_memory = members, len(members) > 1

    def _subgroup(self, ranks: range, device: torch.device) -> Comm:
        members = self.members[ranks.start : ranks.stop : ranks.step]
        return SimulatedComm(ranks.index(self.rank), members)

    def start(self, requests: Sequence[Request]) -> Started:
        """Have requests answered for synchronous code, which `SimulatedRanks.run` runs; see Comm."""
        answers = ask(requests)
        return Started(lambda: answers, lambda: True)


class SimulatedRanks:
    """``world_size`` ranks in one process.

    Args:
        shares: False: every rank computes for itself what is alike on all, as ranks of their own processes do.

    Attributes:
        comms: of each rank.

    Raises:
        ValueError: world_size is less than 1.
    """

    def __init__(self, world_size: int, *, shares: bool = True) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.comms = [SimulatedComm(rank, range(world_size)) for rank in range(world_size)]
        self._shares = shares

    def carry_out(self, reductions: Sequence[Reduction[T]], *, on_cores: bool = False) -> list[T]:
        """Return what each rank's reduction returns, in rank order.

        Args:
            on_cores: let several ranks compute at a time, on as many cores as torch's operations have threads here.

        Raises:
            The error of the first rank that failed; in the others a PeerError that names it is raised.
            PeerError: ranks differ in what they request.
        """
        cores = cores_for(len(self.comms)) if on_cores else None
        return _Run(self.comms, reductions, self._shares, cores, is_timed=True).results()

    def run(self, work: Callable[[Comm], T]) -> list[T]:
        """Call synchronous ``work`` on every rank, each in a thread of its own, and return the results in rank order.

        For loops of training that exchange something inside of ``optimizer.step()``; see `carry_out` for errors.
        """
        num_threads = torch.get_num_threads()
        try:
            calls = [in_thread(work, comm) for comm in self.comms]
            cores = cores_for(len(self.comms))
            return _Run(self.comms, calls, self._shares, cores, is_timed=False).results()
        finally:
            torch.set_num_threads(num_threads)  # new threads take the last number set

    def close(self) -> None:
        """Nothing is left to close: there for ``contextlib.closing``."""


class _Rank(Running[T]):
    """A rank's reduction.

    Attributes:
        answers: what it is to be sent, for which it has ``waited`` seconds.
        error: what ended it.
    """

    comm: SimulatedComm

    def __init__(self, comm: SimulatedComm, reduction: Reduction[T], *, is_timed: bool) -> None:
        super().__init__(reduction, comm, is_timed=is_timed)
        self.answers: list[Any] | None = None
        self.waited: Seconds = 0.0
        self.error: BaseException | None = None

    def take_turn(self) -> None:
        """Go on with the answers."""
        try:
            self.go_on(self.answers, self.waited)
        except BaseException as error:
            self.error = error
            self.close()

    @property
    def members(self) -> range:
        """The ranks that it asks."""
        comm = self.requests[0].comm
        assert isinstance(comm, SimulatedComm)
        return comm.members

    @property
    def call(self) -> str:
        """What it waits for, in words."""
        return " and ".join(type(each).__name__ for each in self.requests)


class _Run(Generic[T]):
    """All ranks' reductions, carried out to their ends."""

    def __init__(
        self,
        comms: Sequence[SimulatedComm],
        reductions: Sequence[Reduction[T]],
        shares: bool,
        cores: ThreadPoolExecutor | None,
        *,
        is_timed: bool,
    ) -> None:
        self._ranks = [_Rank(comm, each, is_timed=is_timed) for comm, each in zip(comms, reductions, strict=True)]
        self._is_timed = is_timed
        self._shares = shares and len(comms) > 1
        self._each: Callable[[Callable[[Any], None], Sequence[Any]], object] = cores.map if cores else map

    def results(self) -> list[T]:
        """Return what each rank returns."""
        ready = list(self._ranks)
        try:
            while ready:
                list(self._each(_Rank.take_turn, ready))  # type: ignore[call-overload]
                self._raise_errors()
                ready = self._answered()[::-1]  # the last one first: what it works on is still in the caches
        except BaseException as error:
            self._end_by(error)
            raise
        return [rank.result for rank in self._ranks]

    def _raise_errors(self) -> None:
        for rank in self._ranks:
            if rank.error is not None:
                raise rank.error

    def _end_by(self, error: BaseException) -> None:
        """Have the ranks that wait end too, by an error that says whose it was."""
        failed = next((place for place, rank in enumerate(self._ranks) if rank.error is error), None)
        words = str(error) if failed is None else words_of_failure(failed, error)
        for rank in self._ranks:
            if not rank.has_ended:
                with suppress(Exception):  # this one, as it should
                    rank.throw(PeerError(words))
                rank.close()

    def _answered(self) -> list[_Rank[T]]:
        """Answer the groups of ranks of which all members have come; return these."""
        waiting = [(place, rank) for place, rank in enumerate(self._ranks) if not rank.has_ended]
        groups: dict[range, dict[int, _Rank[T]]] = {}
        for place, rank in waiting:
            groups.setdefault(rank.members, {})[place] = rank
        complete = [group for members, group in groups.items() if len(group) == len(members)]
        if waiting and not complete:
            raise PeerError(self._why_none_can_go_on(waiting))
        for group in complete:
            self._answer(group)
        return [rank for group in complete for rank in group.values()]

    def _why_none_can_go_on(self, waiting: Sequence[tuple[int, _Rank[T]]]) -> str:
        place, rank = waiting[0]
        for other in rank.members:
            if self._ranks[other].has_ended:
                return f"rank {other} ended without coming to {rank.call}, where rank {place} waits"
        other = next(member for member in rank.members if self._ranks[member].members != rank.members)
        asks = f"rank {place} calls {rank.call} with ranks {list(rank.members)}"
        return f"{asks}, rank {other} {self._ranks[other].call} with ranks {list(self._ranks[other].members)}"

    def _answer(self, group: dict[int, _Rank[T]]) -> None:
        """Answer what the ranks of a group request, and count it."""
        _check_alike(group)
        ranks = list(group.values())
        began = ranks[0].comm.now() if self._is_timed else 0.0
        answers = []
        for requests in zip(*(rank.requests for rank in ranks), strict=True):
            for request in requests:
                request.count()
            answers.append(self._answers(requests))
        took = ranks[0].comm.now() - began if self._is_timed else 0.0
        for rank, of_rank in zip(ranks, zip(*answers, strict=True), strict=True):
            rank.answers, rank.waited = list(of_rank), took * (1 / len(ranks))

    def _answers(self, requests: Sequence[Any]) -> list[Any]:
        """Return each rank's answer to the requests that all of them have made."""
        first = requests[0]
        if isinstance(first, Fill):
            return self._filled(requests)
        if isinstance(first, Once):
            return self._made_for_all(requests, first.work)
        if isinstance(first, AllToAll):
            return list(_dealt(requests))
        if isinstance(first, AllReduce):
            self._add_up_([request.mine for request in requests])
            return [request.answer(request.mine) for request in requests]
        if isinstance(first, Broadcast):
            for request in requests:
                if request is not requests[first.source]:
                    request.mine.copy_(requests[first.source].mine)
            return [request.mine for request in requests]
        join = torch.stack if isinstance(first, AllGather) else torch.cat
        answers: list[Any] = self._made_for_all(
            requests, lambda: first.answer(join([request.mine for request in requests]))
        )
        return answers

    def _made_for_all(self, requests: Sequence[Any], work: Callable[[], Any]) -> list[Any]:
        if self._shares:
            return [work()] * len(requests)
        return [request.work() if isinstance(request, Once) else work() for request in requests]

    def _filled(self, requests: Sequence[Fill]) -> list[Any]:
        if not self._shares:
            return [request.work() for request in requests]
        made = requests[0].work()
        for request in requests[1:]:
            request.into.copy_(requests[0].into)
        return [made] * len(requests)

    def _add_up_(self, vectors: Sequence[Tensor]) -> None:
        """Make all vectors their sum, added in rank order."""
        if vectors[0].device.type != "cpu" or not all(vector.is_contiguous() for vector in vectors):
            _add_up_(vectors)
            return
        blocks = list(zip(*(vector.view(-1).split(BLOCK) for vector in vectors), strict=True))
        list(self._each(_add_up_, blocks))  # type: ignore[call-overload]


def _add_up_(vectors: Sequence[Tensor]) -> None:
    total = vectors[0]
    for vector in vectors[1:]:
        total += vector
    for vector in vectors[1:]:
        vector.copy_(total)


def _dealt(requests: Sequence[AllToAll]) -> Iterator[Tensor]:
    """Yield what each rank receives."""
    sent = [request.mine.split(list(request.sizes)) for request in requests]
    for rank, request in enumerate(requests):
        coming = [lists[rank] for lists in sent if lists[rank].numel()]
        yield torch.cat(coming) if coming else request.mine.new_empty(0)


def _check_alike(group: dict[int, _Rank[Any]]) -> None:
    """Raise PeerError where the ranks of a group request different things."""
    (first, rank), *others = group.items()
    for place, other in others:
        if rank.call != other.call:
            raise PeerError(f"rank {first} calls {rank.call}, rank {place} {other.call} at the same time")
        for one, two in zip(rank.requests, other.requests, strict=True):
            mine, theirs = one.must_match, two.must_match
            if mine != theirs:
                name = next(key for key in mine if mine[key] != theirs[key])
                given = f"{name} {mine[name]}, rank {place} with {name} {theirs[name]}"
                raise PeerError(f"rank {first} calls {type(one).__name__} with {given}")
    for requests in zip(*(each.requests for each in group.values()), strict=True):
        _check_sizes(list(group), requests)


def _check_sizes(ranks: Sequence[int], requests: Sequence[Request]) -> None:
    """Raise PeerError where a rank gives as many elements as another one does not expect."""
    for at, request in enumerate(requests):
        if isinstance(request, AllGatherLists) and request.counts[at] != request.mine.numel():
            raise PeerError(f"rank {ranks[at]} has {request.mine.numel()} elements to gather, not {request.counts[at]}")
        if isinstance(request, AllToAll):
            sent = [other.sizes[at] for other in requests if isinstance(other, AllToAll)]
            if sent != list(request.received):
                raise PeerError(f"rank {ranks[at]} is sent {sent} elements, and expects {list(request.received)}")
