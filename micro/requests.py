"""What a reduction can ask of the other ranks, and how requests are carried out one after the other.

A *reduction* is a generator: straight code from the gradient to the update, which yields a request where it needs the
other ranks and is sent the answer. Selectors, exchanges and reducers are written so and composed by ``yield from``.
They do not know who carries their requests out. All ranks make the same requests in the same order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from micro.comm import Comm, Kind
from micro.operations import Op, travels_padded
from micro.shared_messages import Copies, Message, Parts, Rows, Sum

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False)
class Request(ABC):
    """Something that a reduction needs before it can go on.

    Attributes:
        comm: the ranks that it asks; None: those of the reduction (see `over`).
    """

    comm: Comm | None = None

    @abstractmethod
    def answer(self, comm: Comm) -> Any:
        """Carry it out over these ranks and return the answer."""

    @abstractmethod
    def call(self, comm: Comm) -> "Call":
        """Return the message that it needs over these ranks, and what makes the answer of it."""

    @property
    def joins(self) -> Hashable:
        """What is equal for requests that one message can carry; None where it travels alone."""
        return None


@dataclass(frozen=True, slots=True)
class Call:
    """A request on its way.

    Attributes:
        message: None where nothing has to be sent.
        take: returns the answer, once the message was carried out.
        op, size, kind: as what it is counted; None: not at all.
    """

    message: Message | None
    take: Callable[[], Any]
    op: Op | None = None
    size: int = 0
    kind: Kind = "counts"

    def count(self, comm: Comm) -> None:
        """Count what it sends as sent by ``comm``."""
        if self.op is not None:
            comm.count(self.kind, self.op, self.size)


Reduction = Generator[Request | list[Request], Any, T]
"""A reduction under way: it yields requests, is sent their answers, and returns its result.

Of a list of requests, those of one kind travel in one message; the answer is the list of answers.
"""


@dataclass(slots=True, kw_only=True, eq=False)
class AllGather(Request):
    """Every rank's row, in rank order: (world_size, m).

    Attributes:
        mine: (m,) as long on all ranks, at least 1.
        kind: as what its bytes count.
        read: whether the answer is needed in the host's memory.
    """

    mine: Tensor
    kind: Kind = "counts"
    read: bool = False

    @property
    def joins(self) -> Hashable:
        """Rows of one kind and dtype are one row."""
        return ("all_gather", self.kind, self.mine.dtype, self.read)

    def answer(self, comm: Comm) -> Tensor:
        """Return the rows."""
        rows = comm.gather_rows(self.mine, self.kind)
        return rows.cpu() if self.read else rows  # host sync: what follows depends on it

    def call(self, comm: Comm) -> Call:
        """Return the gathering of rows."""
        if comm.world_size == 1:
            return Call(None, lambda: self.mine[None])
        row = self.mine.contiguous()
        rows = row.new_empty((comm.world_size, row.numel()))
        message = Rows(comm=comm, rows=rows, row=row)
        return Call(message, lambda: rows.cpu() if self.read else rows, "gather_rows", row.nbytes, self.kind)


@dataclass(slots=True, kw_only=True, eq=False)
class AllGatherLists(Request):
    """Every rank's list, one after the other in rank order: (sum(counts),). Nobody may change the answer.

    Attributes:
        mine: (m,) may be empty.
        counts: the length of each rank's list.
        kind: as what its bytes count.
    """

    mine: Tensor
    counts: Sequence[int]
    kind: Kind

    def answer(self, comm: Comm) -> Tensor:
        """Return the lists."""
        return comm.gather_joined(self.mine, self.counts, self.kind)

    def call(self, comm: Comm) -> Call:
        """Return the gathering of lists: of rows filled up to the longest where lengths differ little."""
        mine, counts, n = self.mine, list(self.counts), comm.world_size
        if n == 1:
            return Call(None, lambda: mine)
        if travels_padded(counts):
            longest = max(counts)
            row = torch.nn.functional.pad(mine, (0, longest - mine.numel()))
            rows = mine.new_empty((n, longest))
            message = Rows(comm=comm, rows=rows, row=row)
            return Call(message, lambda: without_padding(rows, counts), "gather_lists", row.nbytes, self.kind)
        received, size = mine.new_empty(sum(counts)), mine.nbytes
        if not sum(counts):  # known everywhere, so all ranks skip together
            return Call(None, lambda: received, "gather_lists", size, self.kind)
        sent, sizes = mine.repeat(n), [mine.numel()] * n
        parts = Parts(comm=comm, received=received, sent=sent, received_sizes=counts, sent_sizes=sizes)
        return Call(parts, lambda: received, "gather_lists", size, self.kind)


@dataclass(slots=True, kw_only=True, eq=False)
class AllToAll(Request):
    """What each rank sends to this one, one list after the other in rank order: (sum(received),).

    What a rank sends to itself costs nothing.

    Attributes:
        mine: (sum(sizes),) one list after the other, one for each rank.
        sizes: the lengths of these.
        received: the lengths of what comes from each rank.
        kind: as what its bytes count.
    """

    mine: Tensor
    sizes: Sequence[int]
    received: Sequence[int]
    kind: Kind

    def answer(self, comm: Comm) -> Tensor:
        """Return what comes."""
        return comm.scatter_lists(self.mine, self.sizes, self.received, self.kind)

    def call(self, comm: Comm) -> Call:
        """Return the sending of parts."""
        mine, sizes, coming = self.mine, list(self.sizes), list(self.received)
        if comm.world_size == 1:
            return Call(None, lambda: mine)
        received = mine.new_empty(sum(coming))
        parts = Parts(comm=comm, received=received, sent=mine, received_sizes=coming, sent_sizes=sizes)
        size = (mine.numel() - sizes[comm.rank]) * mine.element_size()
        return Call(parts, lambda: received, "scatter", size, self.kind)


@dataclass(slots=True, kw_only=True, eq=False)
class AllReduce(Request):
    """The sum over all ranks, in the memory of ``mine``.

    Attributes:
        mine: of one shape on all ranks.
        kind: as what its bytes count.
        read: whether the answer is needed in the host's memory.
        last: whether nothing is requested after it: then it travels alone, at once, and no round waits for it.
    """

    mine: Tensor
    kind: Kind = "values"
    read: bool = False
    last: bool = False

    @property
    def joins(self) -> Hashable:
        """Sums of one kind and dtype are one sum."""
        return ("all_reduce", self.kind, self.mine.dtype, self.read)

    def answer(self, comm: Comm) -> Tensor:
        """Return the sum."""
        total = comm.all_reduce_(self.mine, self.kind)
        return total.cpu() if self.read else total  # host sync: what follows depends on it

    def call(self, comm: Comm) -> Call:
        """Return the summing up."""
        if comm.world_size == 1:
            return Call(None, lambda: self.mine)
        mine = self.mine
        message = Sum(comm=comm, x=mine)
        return Call(message, lambda: mine.cpu() if self.read else mine, "all_reduce", mine.nbytes, self.kind)


@dataclass(slots=True, kw_only=True, eq=False)
class Broadcast(Request):
    """What one rank has, in the memory of ``mine``.

    Attributes:
        mine: of one shape on all ranks.
        source: the rank.
        kind: as what its bytes count.
    """

    mine: Tensor
    source: int
    kind: Kind

    def answer(self, comm: Comm) -> Tensor:
        """Return the source's."""
        return comm.broadcast_(self.mine, self.source, self.kind)

    def call(self, comm: Comm) -> Call:
        """Return the copying."""
        if comm.world_size == 1:
            return Call(None, lambda: self.mine)
        message = Copies(comm=comm, x=self.mine, source=self.source)
        return Call(message, lambda: self.mine, "broadcast", self.mine.nbytes, self.kind)


@dataclass(slots=True, kw_only=True, eq=False)
class Once(Request):
    """What follows from values that all ranks hold alike. No message: ranks that share memory compute it once.

    Attributes:
        work: depends on nothing but such values, and changes none of them. Nobody may change what it returns.
    """

    work: Callable[[], Any]

    def answer(self, comm: Comm) -> Any:
        """Return it."""
        return comm.alike(self.work)

    def call(self, comm: Comm) -> Call:
        """Return the work: there is no message."""
        return Call(None, lambda: self.answer(comm))


@dataclass(slots=True, kw_only=True, eq=False)
class Fill(Request):
    """As `Once`, for work that writes into this rank's own memory what all ranks get alike.

    Attributes:
        into: own memory, which ``work`` fills.
        work: as for `Once`; it may use ``into`` alone of what is this rank's own, and not what is in it, unless that is
            the same on all ranks.
    """

    into: Tensor
    work: Callable[[], Any]

    def answer(self, comm: Comm) -> Any:
        """Return what ``work`` returns."""
        return comm.fill_alike_(self.into, self.work)

    def call(self, comm: Comm) -> Call:
        """Return the work: there is no message."""
        return Call(None, lambda: self.answer(comm))


def without_padding(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the first ``counts[r]`` of each row r of ``rows`` (n, longest), one after the other."""
    longest, flat = rows.shape[1], rows.view(-1)
    if longest == min(counts):
        return flat
    lists_and_gaps = flat.split([size for count in counts for size in (count, longest - count)])
    return torch.cat(lists_and_gaps[::2])


def over(comm: Comm, reduction: Reduction[T]) -> Reduction[T]:
    """Carry on ``reduction`` with other ranks: its requests are of ``comm``, unless they name ranks themselves."""
    answer: Any = None
    try:
        while True:
            request = reduction.send(answer)
            for each in request if isinstance(request, list) else [request]:
                each.comm = each.comm or comm
            answer = yield request
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        reduction.close()


def together(reductions: Sequence[Reduction[T]]) -> Reduction[list[T]]:
    """Carry on several reductions side by side; what they request at a time travels together.

    Which of them request something is the same on all ranks: it follows from the answers before.
    """
    results: dict[int, T] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(reductions)))
    while answers:
        waiting: dict[int, Request] = {}
        for place, answer in answers.items():
            try:
                request = reductions[place].send(answer)
                assert isinstance(request, Request), "each requests one thing at a time"
                waiting[place] = request
            except StopIteration as end:
                results[place] = end.value
        given = (yield list(waiting.values())) if waiting else []
        answers = dict(zip(waiting, given, strict=True))
    return [results[place] for place in range(len(reductions))]


def carried_out(reduction: Reduction[T], comm: Comm) -> T:
    """Return what a reduction returns; each request is carried out, by itself, as it comes."""
    answer: Any = None
    try:
        while True:
            request = reduction.send(answer)
            answer = _answers(request, comm) if isinstance(request, list) else _answers([request], comm)[0]
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        reduction.close()


def _answers(requests: Sequence[Request], comm: Comm) -> list[Any]:
    """Return the answer to each request, of which some travel together."""
    joined: dict[Hashable, list[int]] = {}
    for place, request in enumerate(requests):
        key = request.joins
        joined.setdefault(place if key is None else (key, request.comm), []).append(place)
    answers: list[Any] = [None] * len(requests)
    for places in joined.values():
        alike = [requests[place] for place in places]
        given = _joint_answers(alike, comm) if len(alike) > 1 else [alike[0].answer(alike[0].comm or comm)]
        for place, answer in zip(places, given, strict=True):
            answers[place] = answer
    return answers


def _joint_answers(requests: Sequence[Any], comm: Comm) -> list[Tensor]:
    """Return the answers of requests that are one message: rows or sums, one after the other."""
    first = requests[0]
    own = first.comm or comm
    sizes = [request.mine.numel() for request in requests]
    joint = type(first)(mine=torch.cat([request.mine for request in requests]), kind=first.kind, read=first.read)
    answer: Tensor = joint.answer(own)
    if answer.dim() == 1:
        return list(answer.split(sizes))
    parts: list[Tensor] = own.alike(lambda: [part.contiguous() for part in answer.split(sizes, dim=-1)])
    return parts
