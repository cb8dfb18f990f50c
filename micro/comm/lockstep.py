"""Simulate n ranks in one process: each runs to its next request, then all get the answers.

Ranks have no threads and do not wait. Results that are equal on all ranks are computed once. If ranks make different
requests, an error names them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from micro.comm.loop import Running, numbers_for, waited_for
from micro.comm.peers import PeerError, words_of_failure
from micro.comm.rank_threads import ask, cores_for, in_thread
from micro.comm.ranks import Comm, Started
from micro.comm.requests import (
    AllGather,
    AllGatherLists,
    AllReduce,
    AllToAll,
    Broadcast,
    Fill,
    Once,
    Reduction,
    Request,
    Sending,
    described,
)

T = TypeVar("T")
BLOCK = 2**16  # elements of a sum that are added up at a time: they stay in a core's cache


class SimulatedComm(Comm):
    """One of n simulated ranks, or of some of them.

    Attributes:
        members: which of all ranks they are.
    """

    def __init__(self, rank: int, members: range) -> None:
        super().__init__(rank, len(members), timed=True)
        self.members, self.shares_memory = members, len(members) > 1

    def subgroup(self, ranks: range, device: torch.device) -> Comm:
        """Return some of these ranks; see Comm."""
        members = self.members[ranks.start : ranks.stop : ranks.step]
        return SimulatedComm(ranks.index(self.rank), members)

    def start(self, requests: Sequence[Request]) -> Started:
        """Have requests answered for synchronous code, which `SimulatedRanks.run` runs; see Comm."""
        answers = ask(requests)
        return Started(lambda: answers)


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
        self._shares = shares and world_size > 1

    def carry_out(self, reductions: Sequence[Reduction[T]], *, on_cores: bool = False) -> list[T]:
        """Return what each rank's reduction returns, in rank order.

        Args:
            on_cores: let several ranks compute at a time, on as many cores as torch's operations have threads here.

        Raises:
            The error of the first rank that failed; in the others a PeerError that names it is raised.
            PeerError: ranks differ in what they request.
        """
        ranks = [Running(reduction, comm) for reduction, comm in zip(reductions, self.comms, strict=True)]
        return _carry_out(ranks, self._shares, _each_on_cores(len(ranks)) if on_cores else map)

    def run(self, work: Callable[[Comm], T]) -> list[T]:
        """Call synchronous ``work`` on every rank, each in a thread of its own, and return the results in rank order.

        For loops of training that exchange something inside of ``optimizer.step()``; see `carry_out` for errors.
        """
        num_threads = torch.get_num_threads()
        try:
            ranks = [Running(in_thread(work, comm), comm.for_reduction()) for comm in self.comms]
            return _carry_out(ranks, self._shares, _each_on_cores(len(ranks)))
        finally:
            torch.set_num_threads(num_threads)  # new threads take the last number set


Each = Callable[..., Any]
"""``map``, one after the other or on several cores."""


def _each_on_cores(world_size: int) -> Each:
    cores = cores_for(world_size)
    return cores.map if cores else map


def _carry_out(ranks: Sequence[Running[T]], shares: bool, each: Each) -> list[T]:
    """Carry out all ranks' reductions to their ends; return what they return."""
    ready, answers, failed = list(range(len(ranks))), list[Any]([None] * len(ranks)), None
    try:
        while ready:
            errors = dict(zip(ready, each(_error_of_turn, [ranks[place] for place in ready], answers), strict=True))
            failed = min((place for place, error in errors.items() if error is not None), default=None)
            if failed is not None:
                raise errors[failed]
            if ready := [place for place, rank in enumerate(ranks) if rank.reads]:
                answers = numbers_for([ranks[place] for place in ready])
                continue
            found: dict[int, list[Any]] = {}
            for group in _complete(ranks):
                found |= zip(group, _Collective(group, shares, each).answers(), strict=True)
            ready = list(found)[::-1]  # what the last works on is in caches
            answers = [found[place] for place in ready]
    except BaseException as error:
        words = str(error) if failed is None else words_of_failure(failed, error)
        for rank in ranks:
            rank.close(PeerError(words))
        raise
    return [rank.result for rank in ranks]


def _error_of_turn(rank: Running[Any], answers: list[Any] | None) -> BaseException | None:
    """Let a rank go on with its answers; return what ended it, if that was an error."""
    try:
        rank.advance(answers)
    except BaseException as error:
        rank.close()
        return error
    return None


def _members(rank: Running[Any]) -> range:
    """Return the ranks that it asks."""
    members: range = rank.requests[0].comm.members
    return members


def _complete(ranks: Sequence[Running[T]]) -> list[dict[int, Running[T]]]:
    """Return the groups of ranks of which all members wait for an answer."""
    groups: dict[range, dict[int, Running[T]]] = {}
    for place, rank in enumerate(ranks):
        if not rank.has_ended:
            groups.setdefault(_members(rank), {})[place] = rank
    complete = [group for members, group in groups.items() if len(group) == len(members)]
    if groups and not complete:
        place, rank = next(iter(next(iter(groups.values())).items()))
        members = _members(rank)
        for other in members:
            if ranks[other].has_ended:
                raise PeerError(
                    f"rank {other} ended without coming to {described(rank.requests)}, where rank {place} waits"
                )
        other = next(member for member in members if _members(ranks[member]) != members)
        asks = f"rank {place} calls {described(rank.requests)} with ranks {list(members)}"
        elsewhere = f"rank {other} {described(ranks[other].requests)} with ranks {list(_members(ranks[other]))}"
        raise PeerError(f"{asks}, {elsewhere}")
    return complete


class _Collective:
    """All ranks of a group with what they request at one time."""

    def __init__(self, group: dict[int, Running[Any]], shares: bool, each: Each) -> None:
        self._group, self._shares, self._each = group, shares, each

    def answers(self) -> list[list[Any]]:
        """Count the requests, and return each rank's answers."""
        _check_alike(self._group)
        ranks = list(self._group.values())
        return waited_for(ranks, lambda: self._answers_to([rank.requests for rank in ranks]))

    def _answers_to(self, requests_of_ranks: list[list[Any]]) -> list[list[Any]]:
        answers = []
        for requests in zip(*requests_of_ranks, strict=True):
            for request in requests:
                if isinstance(request, Sending) and not request.is_empty:
                    request.count()
            answers.append(self._answers(requests))
        return [list(of_rank) for of_rank in zip(*answers, strict=True)]

    def _answers(self, requests: Sequence[Any]) -> list[Any]:
        """Return each rank's answer to the request that all of them have made."""
        first = requests[0]
        if isinstance(first, Once):
            return self._made_once(requests)
        if isinstance(first, AllToAll):
            return list(_dealt(requests))
        mine = [request.mine for request in requests]
        if isinstance(first, AllReduce):
            self._add_up_(mine)
            return mine
        if isinstance(first, Broadcast):
            for vector in mine:
                if vector is not mine[first.source]:
                    vector.copy_(mine[first.source])
            return mine
        join = torch.stack if isinstance(first, AllGather) else torch.cat
        return [join(mine)] * len(mine) if self._shares else [join(mine) for _ in mine]

    def _made_once(self, requests: Sequence[Once]) -> list[Any]:
        if not self._shares:
            return [request.work() for request in requests]
        first = requests[0]
        made = first.work()
        for request in requests[1:]:
            if isinstance(request, Fill) and isinstance(first, Fill):
                request.into.copy_(first.into)
        return [made] * len(requests)

    def _add_up_(self, vectors: Sequence[Tensor]) -> None:
        """Make all vectors their sum, added in rank order."""
        if vectors[0].device.type != "cpu" or not all(vector.is_contiguous() for vector in vectors):
            _add_up_(vectors)
        else:
            blocks = list(zip(*(vector.view(-1).split(BLOCK) for vector in vectors), strict=True))
            list(self._each(_add_up_, blocks))


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


def _check_alike(group: dict[int, Running[Any]]) -> None:
    """Raise PeerError where ranks, by number, request different things at one time."""
    (first, rank), *others = group.items()
    mine = [each.signature for each in rank.requests]
    for place, other in others:
        if [each.signature for each in other.requests] != mine:
            words = f"rank {first} calls {described(rank.requests)}, rank {place} {described(other.requests)}"
            raise PeerError(f"{words} at the same time")
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
