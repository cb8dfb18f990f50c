"""Collectives among the ranks: the only file that calls them, and the one place where bytes are counted.

Bytes are what the bandwidth-optimal form of a collective sends, as a mean over the ranks: ``(n-1) b`` for an all-gather
of b bytes per rank, ``2 b (n-1)/n`` for an all-reduce, ``b (n-1)/n`` for a broadcast (micro.operations.bytes_sent).
"""

import ctypes
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from micro.operations import Op, bytes_sent, travels_padded
from micro.peer_failures import PeerFailures, Pending, Watched
from micro.spans import Seconds, now

if TYPE_CHECKING:
    from micro.rounds import Rounds

Kind = Literal["counts", "indices", "values"]
T = TypeVar("T")


@dataclass(slots=True)
class Traffic:
    """What the collectives of one step cost this rank.

    Attributes:
        num_bytes: bytes sent, by kind.
        elapsed: seconds spent inside collectives.
        calls: each operation in turn, with its size as micro.planning.tables.LinkTable counts it.
        local_bytes: the part of num_bytes that stayed within a node, where ranks are of two levels.
        local_calls: the operations within a node, with their sizes.
        num_shared: of the operations, those that travelled in a collective of another bucket (micro.rounds).
    """

    num_bytes: dict[Kind, float] = field(default_factory=lambda: {"counts": 0.0, "indices": 0.0, "values": 0.0})
    elapsed: Seconds = 0.0
    calls: list[tuple[Op, float]] = field(default_factory=list)
    local_bytes: float = 0.0
    local_calls: list[tuple[Op, float]] = field(default_factory=list)
    num_shared: int = 0

    @property
    def num_collectives(self) -> int:
        """Number of collectives called, but for those of which another bucket's message was the first."""
        return len(self.calls) + len(self.local_calls) - self.num_shared

    def move(self, num_bytes: float, kind: "Kind", to: "Kind") -> None:
        """Count as ``to`` a part of what was counted as ``kind``: several kinds may share a message."""
        self.num_bytes[kind] -= num_bytes
        self.num_bytes[to] += num_bytes

    def add_local(self, local: "Traffic") -> None:
        """Add what the collectives within a node cost."""
        for kind, sent in local.num_bytes.items():
            self.num_bytes[kind] += sent
        self.elapsed += local.elapsed
        self.local_bytes += sum(local.num_bytes.values())
        self.local_calls += local.calls


@dataclass(frozen=True, slots=True)
class Levels:
    """A group of ranks as nodes: ``within``, the ranks of this rank's node; ``between``, those of the same place.

    Rank r is the rank ``r % ranks_per_node`` within its node and the rank ``r // ranks_per_node`` between nodes.
    """

    within: "Comm"
    between: "Comm"


class Comm(ABC):
    """The ranks that reduce together. One rank is a group too: it sends nothing."""

    def __init__(self, rank: int, world_size: int, *, timed: bool = True) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timed = timed
        self.traffic = Traffic()
        self._levels: dict[int, Levels] = {}

    def levels(self, ranks_per_node: int, device: torch.device) -> Levels:
        """Return this rank's node and its peers in other nodes; all ranks make them together, at the first call.

        Args:
            device: of what they will send.

        Raises:
            ValueError: the ranks cannot be divided into nodes of this size.
        """
        if self.world_size % ranks_per_node:
            raise ValueError(
                f"ranks_per_node must divide the number of ranks, got {ranks_per_node} for {self.world_size} ranks"
            )
        if ranks_per_node not in self._levels:
            node, place = divmod(self.rank, ranks_per_node)
            within = range(node * ranks_per_node, (node + 1) * ranks_per_node)
            between = range(place, self.world_size, ranks_per_node)
            self._levels[ranks_per_node] = Levels(self._part(within, device), self._part(between, device))
        return self._levels[ranks_per_node]

    def _part(self, ranks: range, device: torch.device) -> "Comm":
        return SoloComm(timed=self.timed) if len(ranks) == 1 else self._subgroup(ranks, device)

    def _subgroup(self, ranks: range, device: torch.device) -> "Comm":
        """Return a group of some ranks of this one, this rank among them; each of them calls this."""
        raise ValueError(f"{type(self).__name__} has no groups of some of its ranks: use a GroupComm")

    def begin_step(self) -> None:
        """Start the counts of a new step."""
        self.traffic = Traffic()

    def now(self, device: torch.device) -> Seconds:
        """Return a time; where this group is timed, that of an accelerator's current stream. The host does not wait."""
        return now(device, timed=self.timed)

    def alike(self, work: Callable[[], T]) -> T:
        """Return what ``work`` makes of values that all ranks hold alike; nobody may change it.

        All ranks call this in the same order. Each computes for itself, but for simulated ranks, which share memory:
        one of them works for all.

        Args:
            work: depends on nothing but such values, changes none of them and calls no collective.
        """
        return work()

    def fill_alike_(self, out: Tensor, work: Callable[[], T]) -> T:
        """Return as `alike` what ``work`` returns, which writes into this rank's ``out`` what all ranks get alike.

        Args:
            work: as for `alike`; it may use ``out`` alone of what is this rank's own, and not what is in it, unless
                that is the same on all ranks.
        """
        return work()

    def gather_rows(self, row: Tensor, kind: Kind = "counts") -> Tensor:
        """Return (world_size, m), every rank's ``row`` (m,) in rank order; m is the same on all ranks, at least 1.

        Nobody may change the result, which simulated ranks share.
        """
        if self.world_size == 1:
            return row[None]
        with self._counted(kind, row.device, "gather_rows", _num_bytes(row)):
            return self._gathered_rows(row.contiguous())

    def gather_lists(self, mine: Tensor, counts: Sequence[int], kind: Kind) -> list[Tensor]:
        """Return every rank's 1-D list in rank order; lengths may differ (``counts``, known everywhere) and be 0.

        Lists of about one length (`travels_padded`) are filled up to the longest and gathered: each passes every link
        between two ranks once, and a rank sends the longest to n-1 others. Other lists, and those of two ranks, are
        sent to each other rank as they are.
        """
        return list(self.gather_joined(mine, counts, kind).split(list(counts)))

    def gather_joined(self, mine: Tensor, counts: Sequence[int], kind: Kind) -> Tensor:
        """Return the lists of `gather_lists` as one (sum(counts),), one after the other in rank order.

        Nobody may change the result, which simulated ranks share.
        """
        if self.world_size == 1:
            return mine
        sent = max(counts) if travels_padded(counts) else mine.numel()
        with self._counted(kind, mine.device, "gather_lists", sent * mine.element_size()):
            return self._gathered_lists(mine, counts)

    def _gathered_rows(self, row: Tensor) -> Tensor:
        rows = row.new_empty((self.world_size, row.numel()))
        self._gather_rows(rows, row)
        return rows

    def _gathered_lists(self, mine: Tensor, counts: Sequence[int]) -> Tensor:
        if travels_padded(counts):
            return self._gather_padded(mine, counts)
        received = mine.new_empty(sum(counts))
        if sum(counts):  # known everywhere, so all ranks skip together
            self._exchange(received, mine.repeat(self.world_size), list(counts), [mine.numel()] * self.world_size)
        return received

    def _gather_padded(self, mine: Tensor, counts: Sequence[int]) -> Tensor:
        longest = max(counts)
        row = mine.contiguous() if mine.numel() == longest else _filled_up(mine, longest)
        rows = mine.new_empty((self.world_size, longest))
        self._gather_rows(rows, row)
        flat = rows.view(-1)
        if longest == min(counts):
            return flat
        lists_and_gaps = flat.split([size for count in counts for size in (count, longest - count)])
        return torch.cat(lists_and_gaps[::2])

    def scatter_parts(self, mine: Tensor, sizes: Sequence[int], kind: Kind) -> Tensor:
        """Send part j of ``mine`` (``sizes[j]`` elements) to rank j; return those received (world_size, own size)."""
        own = sizes[self.rank]
        if self.world_size == 1:
            return mine[None]
        received = mine.new_empty((self.world_size, own))
        sent = (mine.numel() - own) * mine.element_size()
        with self._counted(kind, mine.device, "scatter", sent):
            self._exchange(received.view(-1), mine, [own] * self.world_size, list(sizes))
        return received

    def scatter_to_others(self, mine: Tensor, sizes: Sequence[int], kind: Kind) -> Tensor:
        """Send each other rank j its part of ``mine`` (``sizes[j]`` elements), in rank order, without one of this rank.

        Returns:
            (world_size - 1, own size) the parts received, in rank order.
        """
        own, ranks = sizes[self.rank], range(self.world_size)
        received = mine.new_empty((self.world_size - 1, own))
        if self.world_size > 1:
            with self._counted(kind, mine.device, "scatter", _num_bytes(mine)):
                if sum(sizes):  # known everywhere, so all ranks skip together
                    received_sizes, sent_sizes = (
                        [0 if rank == self.rank else size for rank, size in zip(ranks, given, strict=True)]
                        for given in ([own] * self.world_size, sizes)
                    )
                    self._exchange(received.view(-1), mine, received_sizes, sent_sizes)
        return received

    def scatter_lists(self, mine: Tensor, sizes: Sequence[int], received_sizes: Sequence[int], kind: Kind) -> Tensor:
        """Send each rank its list, unpadded; return those received, one after the other in rank order.

        Lists may be empty. What a rank sends to itself costs nothing.

        Args:
            mine: (sum(sizes),) one list after the other, ``sizes[j]`` elements for rank j.
            received_sizes: how many elements each rank sends here; exchanged beforehand.
        """
        if self.world_size == 1:
            return mine
        received = mine.new_empty(sum(received_sizes))
        with self._counted(kind, mine.device, "scatter", (mine.numel() - sizes[self.rank]) * mine.element_size()):
            self._exchange(received, mine, list(received_sizes), list(sizes))
        return received

    def all_reduce_(self, x: Tensor, kind: Kind = "values") -> Tensor:
        """Sum ``x`` over all ranks in place."""
        if self.world_size > 1:
            with self._counted(kind, x.device, "all_reduce", _num_bytes(x)):
                self._all_reduce_(x)
        return x

    def broadcast_(self, x: Tensor, source: int, kind: Kind) -> Tensor:
        """Copy rank ``source``'s ``x`` to all ranks in place."""
        if self.world_size > 1:
            with self._counted(kind, x.device, "broadcast", _num_bytes(x)):
                self._broadcast_(x, source)
        return x

    def start_sum(self, x: Tensor) -> Pending | None:
        """Start to sum ``x`` over all ranks in place, and return what waits for the end; None where that cannot be.

        Nothing is counted.
        """
        return None

    def start_side_by_side(self, calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
        """Start the collectives that these call, in this order on all ranks; return what waits for the end of all.

        Here each has ended when the next is started.
        """
        for call in calls:
            call()
        return lambda: None

    @contextmanager
    def _counted(self, kind: Kind, device: torch.device, op: Op, size: int) -> Iterator[None]:
        started = self.now(device)
        yield
        self.traffic.elapsed += self.now(device) - started
        self.count(kind, op, size)

    def count(self, kind: Kind, op: Op, size: int) -> None:
        """Count an operation of this size, as micro.planning.tables.LinkTable counts it."""
        self.traffic.num_bytes[kind] += bytes_sent(op, size, self.world_size)
        self.traffic.calls.append((op, size))

    @abstractmethod
    def _gather_rows(self, rows: Tensor, row: Tensor) -> None: ...

    @abstractmethod
    def _exchange(self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]) -> None: ...

    @abstractmethod
    def _all_reduce_(self, x: Tensor) -> None: ...

    @abstractmethod
    def _broadcast_(self, x: Tensor, source: int) -> None: ...


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _filled_up(x: Tensor, length: int) -> Tensor:
    """Return ``x`` (m,) with zeros after it, (length,)."""
    return torch.cat([x, x.new_zeros(length - x.numel())])


class SoloComm(Comm):
    """A group of one rank, for a run without torch.distributed; no primitive is ever reached."""

    def __init__(self, *, timed: bool = True) -> None:
        super().__init__(0, 1, timed=timed)

    def _gather_rows(self, rows: Tensor, row: Tensor) -> None:
        raise AssertionError("a group of one rank calls no collective")

    def _exchange(self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]) -> None:
        raise AssertionError("a group of one rank calls no collective")

    def _all_reduce_(self, x: Tensor) -> None:
        raise AssertionError("a group of one rank calls no collective")

    def _broadcast_(self, x: Tensor, source: int) -> None:
        raise AssertionError("a group of one rank calls no collective")


class GroupComm(Comm):
    """The ranks of a torch.distributed process group (gloo or NCCL); the default group when none is given.

    With ``failures``, a collective on the CPU ends with an error soon after another rank has reported one there.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timed: bool = True, failures: PeerFailures | None = None
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timed=timed)
        self._group = group
        self._is_closed = False
        self._failures = failures
        self._started: list[dist.Work] | None = None
        self._rounds: Rounds | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None is the default one.

        Raises:
            RuntimeError: it was given up.
        """
        if self._is_closed:
            raise RuntimeError("the process group was given up: its attachment is closed, or a rank of it failed")
        return self._group

    def close(self) -> None:
        """Forget the process group, which is somebody else's; a collective raises from now on."""
        self._group, self._is_closed = None, True
        if self._rounds is not None:
            self._rounds.abandon()
        for part in self._parts():
            part.close()

    def abort(self, error: BaseException) -> None:
        """Close after an error on this rank, and have the other ranks fail too where it is known how."""
        self.report(error)
        for part in self._parts():
            part.abort(error)
        self.close()

    @property
    def rounds(self) -> "Rounds":
        """What lets messages of several buckets travel together."""
        from micro.rounds import Rounds  # which extends Comm

        if self._rounds is None:
            self._rounds = Rounds()
        return self._rounds

    def report(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one, where it is known how, that it has failed."""
        if self._failures is not None:
            self._failures.report(error)

    def _parts(self) -> Iterator["GroupComm"]:
        both = (part for levels in self._levels.values() for part in (levels.within, levels.between))
        return (part for part in both if isinstance(part, GroupComm))

    def _subgroup(self, ranks: range, device: torch.device) -> Comm:
        from micro.private_comm import PrivateComm  # which extends this class

        return PrivateComm(self.group, device, timed=self.timed, ranks=ranks)

    def _gather_rows(self, rows: Tensor, row: Tensor) -> None:
        self._call(_all_gather_single(), rows.view(-1), row)

    def _exchange(self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]) -> None:
        self._call(dist.all_to_all_single, received, sent, received_sizes, sent_sizes)

    def _all_reduce_(self, x: Tensor) -> None:
        self._call(dist.all_reduce, x)

    def _broadcast_(self, x: Tensor, source: int) -> None:
        self._call(partial(dist.broadcast, group_src=source), x)

    def _call(self, collective: Callable[..., Any], x: Tensor, *more: object) -> None:
        if x.is_cuda or (self._failures is None and self._started is None):
            collective(x, *more, group=self.group)
            return
        work = collective(x, *more, group=self.group, async_op=True)
        if self._started is None:
            self._wait(work)
        else:
            self._started.append(work)

    def wait_for_all(self) -> None:
        """Return once all ranks of the group have called this, or raise what one has reported."""
        self._wait(dist.barrier(self.group, async_op=True))

    def _wait(self, work: dist.Work) -> None:
        if self._failures is None:
            work.wait()
        else:
            self._failures.wait(work)

    def start_side_by_side(self, calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
        """Start the collectives that these call; see Comm. On a CPU all are under way at once."""
        self._started = works = list[dist.Work]()
        try:
            for call in calls:
                call()
        finally:
            self._started = None

        def wait() -> None:
            for work in works:
                self._wait(work)

        return wait

    def start_sum(self, x: Tensor) -> Pending:
        """Start to sum ``x`` over all ranks in place; see Comm."""
        work = dist.all_reduce(x, group=self.group, async_op=True)
        return work if self._failures is None or x.is_cuda else Watched(work, self._failures)


def _all_gather_single() -> Callable[..., object]:
    """Return torch's equal-size all-gather under the name that this version has (renamed in torch 2.13)."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def mean_async(x: Tensor, group: dist.ProcessGroup | None) -> torch.futures.Future[Tensor]:
    """Start to replace ``x`` by its mean over the ranks, as DDP does where it has no hook; return the future of x."""
    work = dist.all_reduce(x.div_(dist.get_world_size(group)), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def gather_objects(item: object, group: dist.ProcessGroup | None = None) -> list[object]:
    """Return every rank's picklable ``item`` in rank order (slow; for set-up, checkpoints and ends, not for steps).

    torch's own all_gather_object needs numpy, which an installation of micro need not have.
    """
    own, lengths = _pickled(item, group)
    rows = [torch.empty_like(own) for _ in lengths]
    dist.all_gather(rows, own, group=group)
    return [_unpickled(row, length) for row, length in zip(rows, lengths, strict=True)]


def gather_objects_at_first(item: object, group: dist.ProcessGroup | None = None) -> list[object] | None:
    """Return every rank's picklable ``item`` in rank order on the group's first rank, None on all others."""
    own, lengths = _pickled(item, group)
    rows = [torch.empty_like(own) for _ in lengths] if dist.get_rank(group) == 0 else None
    dist.gather(own, rows, group=group, group_dst=0)
    return [_unpickled(row, length) for row, length in zip(rows, lengths, strict=True)] if rows else None


def _pickled(item: object, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """Return the item's bytes, filled up to the most that a rank has, and how many each rank has."""
    device = torch.device(dist.distributed_c10d._get_object_coll_device(group))
    content = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8).to(device)
    lengths = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    _all_gather_single()(lengths, torch.tensor([content.numel()], device=device), group=group)
    return torch.nn.functional.pad(content, (0, int(lengths.max()) - content.numel())), lengths.tolist()


def _unpickled(content: Tensor, length: int) -> object:
    content = content.cpu()
    return pickle.loads(ctypes.string_at(content.data_ptr(), length))
