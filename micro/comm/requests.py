"""The requests that a reduction can make of the other ranks: all-gather, all-to-all, all-reduce, broadcast and so on.

A *reduction* is a generator: straight code from the gradient to the update, which yields a request when it needs the
other ranks and receives the answer. Selectors, exchanges and reducers are such generators, composed by ``yield from``.
They do not depend on who answers: a process group (micro.comm.group), simulated ranks (micro.comm.lockstep), or a
single rank. micro.comm.loop runs them. All ranks make the same requests in the same order.
"""

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from micro.comm.ranks import Comm, Kind, Op, bytes_sent, travels_padded

T = TypeVar("T")
LARGE_BYTES = 1 << 20  # a sum of this size travels alone: to copy it costs more than a collective


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Something that a reduction needs before it can go on.

    Attributes:
        comm: the ranks that it asks; those of the reduction where it names none (see `over`).
        last: whether nothing is requested after it, and no round waits for it: a sum then travels alone, at once.
    """

    comm: Comm = None  # type: ignore[assignment]  # the loop sets it
    last: bool = False

    @property
    def signature(self) -> tuple[object, ...]:
        """What is equal on all ranks that request the same."""
        return (type(self).__name__,)

    def alone(self) -> Any:
        """Return the answer of one rank."""
        raise NotImplementedError


@dataclass(slots=True, kw_only=True, eq=False)
class Sending(Request):
    """A request that is a collective.

    Attributes:
        mine: what this rank gives.
        kind: as what its bytes count.
        bytes_by_kind: of its size, the bytes that count as another kind, where several share a message.
        is_empty: whether nothing travels, which all ranks know.
        way: equal for requests of one time that travel in one message (micro.comm.joint).
    """

    op: ClassVar[Op]
    is_empty: ClassVar[Any] = False
    way: ClassVar[Any]
    mine: Tensor
    kind: Kind = "values"
    bytes_by_kind: Mapping[Kind, float] | None = None

    @property
    def signature(self) -> tuple[object, ...]:
        """Name, kind and dtype, and the shape, unless that is each rank's own; see Request."""
        return type(self).__name__, self.kind, self.mine.dtype, *self._sizes

    @property
    def _sizes(self) -> tuple[object, ...]:
        return (tuple(self.mine.shape),)

    @property
    def size(self) -> int:
        """Bytes of the operation; see micro.comm.ranks.OPS."""
        return self.mine.nbytes

    def count(self) -> None:
        """Count it as sent by its ranks: the only place where bytes are counted."""
        size, traffic, n = self.size, self.comm.traffic, self.comm.world_size
        traffic.num_bytes[self.kind] += bytes_sent(self.op, size, n)
        for kind, part in (self.bytes_by_kind or {}).items():
            sent = bytes_sent(self.op, part, n)
            traffic.num_bytes[self.kind] -= sent
            traffic.num_bytes[kind] += sent
        traffic.calls.append((self.op, size))

    def alone(self) -> Any:
        """Return the answer of one rank."""
        return self.mine

    def answer(self, filled: Tensor) -> Tensor:
        """Return the answer, given the memory that the collective has filled."""
        return filled.contiguous()


@dataclass(slots=True, kw_only=True, eq=False)
class AllGather(Sending):
    """Every rank's row ``mine`` (m,), as long on all ranks and at least 1, in rank order: (world_size, m).

    Nobody may change the answer, which simulated ranks share.
    """

    op: ClassVar[Op] = "gather_rows"
    way: ClassVar[Hashable] = "rows"
    kind: Kind = "counts"

    def alone(self) -> Any:
        """Return the answer of one rank."""
        return self.mine[None]

    def row(self) -> Tensor:
        """Return what this rank sends, as long on all ranks."""
        return self.mine.contiguous()


@dataclass(slots=True, kw_only=True, eq=False)
class AllGatherLists(Sending):
    """Every rank's list ``mine`` (m,), which may be empty, one after the other in rank order: (sum(counts),).

    Nobody may change the answer, which simulated ranks share. Lists of about one length (`travels_padded`) are filled
    up to the longest and gathered: each passes every link between two ranks once, and a rank sends the longest to n-1
    others. Other lists, and those of two ranks, are sent to each other rank as they are.

    Attributes:
        counts: the length of each rank's list.
    """

    op: ClassVar[Op] = "gather_lists"
    counts: Sequence[int]

    @property
    def _sizes(self) -> tuple[object, ...]:
        return "counts", tuple(self.counts)

    @property
    def size(self) -> int:
        """Bytes of the list as it travels."""
        return max(self.counts) * self.mine.element_size() if travels_padded(self.counts) else self.mine.nbytes

    @property
    def is_empty(self) -> bool:
        """Whether no rank has any element."""
        return not any(self.counts)

    @property
    def way(self) -> Hashable:
        """Rows where lists are filled up, else parts; see Sending."""
        return "rows" if travels_padded(self.counts) else "parts"

    def row(self) -> Tensor:
        """Return the list, filled up to the longest."""
        return torch.nn.functional.pad(self.mine, (0, max(self.counts) - self.mine.numel()))

    def answer(self, filled: Tensor) -> Tensor:
        """Return the lists without what they were filled up with."""
        if filled.dim() == 1 or filled.shape[1] == min(self.counts):
            return filled.reshape(-1)
        lists_and_gaps = filled.reshape(-1).split([size for n in self.counts for size in (n, filled.shape[1] - n)])
        return torch.cat(lists_and_gaps[::2])

    def parts(self) -> tuple[Tensor, list[int], list[int]]:
        """Return one part for each rank, one after the other, and the sizes of parts sent and received."""
        n = self.comm.world_size
        return torch.cat([self.mine] * n), [self.mine.numel()] * n, list(self.counts)


@dataclass(slots=True, kw_only=True, eq=False)
class AllToAll(Sending):
    """What each rank sends to this one, one list after the other in rank order: (sum(received),).

    ``mine`` (sum(sizes),) is one list after the other, one for each rank. What a rank sends to itself costs nothing.

    Attributes:
        sizes: the lengths of the lists in ``mine``.
        received: the lengths of what comes from each rank.
    """

    op: ClassVar[Op] = "scatter"
    way: ClassVar[Hashable] = "parts"
    sizes: Sequence[int]
    received: Sequence[int]
    _sizes: ClassVar[tuple[object, ...]] = ()

    @property
    def size(self) -> int:
        """Bytes that go to other ranks."""
        return (self.mine.numel() - self.sizes[self.comm.rank]) * self.mine.element_size()

    def parts(self) -> tuple[Tensor, list[int], list[int]]:
        """Return one part for each rank, one after the other, and the sizes of parts sent and received."""
        return self.mine, list(self.sizes), list(self.received)


@dataclass(slots=True, kw_only=True, eq=False)
class AllReduce(Sending):
    """The sum over all ranks, in the memory of ``mine``, which has one shape on all of them."""

    op: ClassVar[Op] = "all_reduce"

    @property
    def way(self) -> Hashable:
        """Sums of one dtype share a message, unless they are large; see Sending."""
        return "sum", self.mine.dtype, self if self.mine.nbytes >= LARGE_BYTES else None


@dataclass(slots=True, kw_only=True, eq=False)
class Broadcast(Sending):
    """What rank ``source`` has, in the memory of ``mine``, which has one shape on all ranks."""

    op: ClassVar[Op] = "broadcast"
    source: int

    @property
    def way(self) -> Hashable:
        """Copies of one source and dtype share a message; see Sending."""
        return "copy", self.mine.dtype, self.source

    @property
    def _sizes(self) -> tuple[object, ...]:
        return tuple(self.mine.shape), "source", self.source


@dataclass(slots=True, kw_only=True, eq=False)
class Once(Request):
    """What follows from values that all ranks hold alike. No message: ranks that share memory compute it once.

    Attributes:
        work: depends on nothing but such values, and changes none of them. Nobody may change what it returns.
    """

    work: Callable[[], Any]

    def alone(self) -> Any:
        """Return the answer of one rank."""
        return self.work()


@dataclass(slots=True, kw_only=True, eq=False)
class Fill(Once):
    """As `Once`, for work that writes into this rank's own memory what all ranks get alike.

    Attributes:
        into: own memory, which ``work`` fills. Of what is this rank's own it may use this alone, and not what is in it,
            unless that is the same on all ranks.
    """

    into: Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class ToHost(Request):
    """Numbers that the host needs of its own accelerator. No message: reductions under way wait for it together.

    Attributes:
        numbers: tensors among others; the answer is the list of them with tensors in the host's memory.
    """

    numbers: Sequence[Any]


Reduction = Generator[Request | list[Request], Any, T]
"""A reduction under way: it yields requests, is sent their answers, and returns its result.

Requests of a list travel side by side; the answer is the list of answers.
"""


def described(requests: Sequence[Request]) -> str:
    """Return in words what ranks have to request alike."""
    return " and ".join(" ".join(map(str, request.signature)) for request in requests)


def known(*numbers: Any, last: bool = False) -> Reduction[Sequence[Any]]:
    """Return numbers (or None, or tensors) as the host knows them; it waits only where an accelerator has some.

    Args:
        last: see Request.
    """
    late = list(filter(torch.is_tensor, numbers))
    if late and not late[0].is_cpu:
        numbers = yield ToHost(numbers=numbers, last=last)
    return [x.item() if isinstance(x, Tensor) and not x.dim() else x for x in numbers] if late else numbers


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
