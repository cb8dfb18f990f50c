"""Messages of several buckets that travel together: one collective carries all of a kind, all kinds go side by side."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from micro.comm import Comm
from micro.operations import Op
from micro.spans import Seconds

LARGE_BYTES = 1 << 20  # a sum of this size travels alone: to copy it costs more than a collective

Done = Callable[[], None]


@dataclass(slots=True, kw_only=True)
class Message(ABC):
    """A collective that a bucket needs, by the tensors that it reads and fills.

    Attributes:
        comm: over which ranks.
        is_shared: it travels in the collective of another bucket's message.
        waited: seconds that it took, its part where others travelled with it.
    """

    comm: Comm
    is_shared: bool = False
    waited: Seconds = 0.0

    @property
    @abstractmethod
    def op(self) -> Op:
        """The operation."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it is."""

    def now(self) -> Seconds:
        """Return a time of where it is."""
        return self.comm.now(self.device)

    @property
    def kind(self) -> Hashable:
        """What is equal for messages that one collective can carry; the same on all ranks."""
        return self.op

    @abstractmethod
    def call(self) -> None:
        """Call the collective for this message alone."""

    @classmethod
    @abstractmethod
    def call_joined(cls, messages: Sequence[Self]) -> Done:
        """Call one collective for several; return what gives each what it received, called when it has ended."""


@dataclass(slots=True, kw_only=True)
class Rows(Message):
    """An all-gather: ``rows`` (world_size, m) becomes every rank's ``row`` (m,)."""

    rows: Tensor
    row: Tensor

    @property
    def op(self) -> Op:
        """The operation."""
        return "gather_rows"

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.row.device

    def call(self) -> None:
        """Call the collective for this message alone."""
        self.comm._gather_rows(self.rows, self.row)

    @classmethod
    def call_joined(cls, messages: Sequence[Self]) -> Done:
        """Gather the rows of all messages as one."""
        row = torch.cat([_bytes_of(message.row) for message in messages])
        rows = row.new_empty((messages[0].comm.world_size, row.numel()))
        messages[0].comm._gather_rows(rows, row)

        def give() -> None:
            parts = rows.split([_bytes_of(message.row).numel() for message in messages], dim=1)
            for message, part in zip(messages, parts, strict=True):
                _bytes_of(message.rows).view(part.shape).copy_(part)

        return give


@dataclass(slots=True, kw_only=True)
class Parts(Message):
    """An all-to-all: each rank gets a part of ``sent``, and ``received`` becomes what all send to this one."""

    received: Tensor
    sent: Tensor
    received_sizes: list[int]
    sent_sizes: list[int]

    @property
    def op(self) -> Op:
        """The operation."""
        return "scatter"

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.sent.device

    def call(self) -> None:
        """Call the collective for this message alone."""
        self.comm._exchange(self.received, self.sent, self.received_sizes, self.sent_sizes)

    @classmethod
    def call_joined(cls, messages: Sequence[Self]) -> Done:
        """Send each rank its parts of all messages, one after the other."""
        sent = [_split(message.sent, message.sent_sizes) for message in messages]
        received = [_split(message.received, message.received_sizes) for message in messages]
        sent_sizes, received_sizes = (
            [sum(part.numel() for part in of_rank) for of_rank in zip(*parts, strict=True)]
            for parts in (sent, received)
        )
        joined = torch.cat([part for of_rank in zip(*sent, strict=True) for part in of_rank])
        arrived = joined.new_empty(sum(received_sizes))
        messages[0].comm._exchange(arrived, joined, received_sizes, sent_sizes)

        def give() -> None:
            targets = [part for of_rank in zip(*received, strict=True) for part in of_rank]
            for target, part in zip(targets, arrived.split([part.numel() for part in targets]), strict=True):
                target.copy_(part)

        return give


@dataclass(slots=True, kw_only=True)
class Sum(Message):
    """An all-reduce of ``x`` in place."""

    x: Tensor

    @property
    def op(self) -> Op:
        """The operation."""
        return "all_reduce"

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.x.device

    @property
    def kind(self) -> Hashable:
        """Sums of one dtype travel together, unless they are large."""
        return ("all_reduce", self.x.dtype, id(self) if self.x.nbytes >= LARGE_BYTES else None)

    def call(self) -> None:
        """Call the collective for this message alone."""
        self.comm._all_reduce_(self.x)

    @classmethod
    def call_joined(cls, messages: Sequence[Self]) -> Done:
        """Add up all vectors as one."""
        joined = torch.cat([message.x.reshape(-1) for message in messages])
        messages[0].comm._all_reduce_(joined)

        def give() -> None:
            for message, part in zip(messages, joined.split([m.x.numel() for m in messages]), strict=True):
                message.x.copy_(part.view(message.x.shape))

        return give


@dataclass(slots=True, kw_only=True)
class Copies(Message):
    """A broadcast of rank ``source``'s ``x`` to all, in place."""

    x: Tensor
    source: int

    @property
    def op(self) -> Op:
        """The operation."""
        return "broadcast"

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.x.device

    @property
    def kind(self) -> Hashable:
        """Copies from one rank travel together."""
        return ("broadcast", self.source)

    def call(self) -> None:
        """Call the collective for this message alone."""
        self.comm._broadcast_(self.x, self.source)

    @classmethod
    def call_joined(cls, messages: Sequence[Self]) -> Done:
        """Copy all as one."""
        joined = torch.cat([_bytes_of(message.x) for message in messages])
        messages[0].comm._broadcast_(joined, messages[0].source)

        def give() -> None:
            sizes = [_bytes_of(message.x).numel() for message in messages]
            for message, part in zip(messages, joined.split(sizes), strict=True):
                _bytes_of(message.x).copy_(part)

        return give


def start_together(messages: Sequence[Message]) -> Done:
    """Start the collectives of these messages, of one group of ranks; return what waits for the end of all.

    Messages of one kind travel in one collective, in the order given. All ranks have the same kinds in the same order.
    """
    kinds: dict[Hashable, list[Message]] = {}
    for message in messages:
        kinds.setdefault((type(message), message.kind), []).append(message)
    gives: list[Done] = []

    def call(alike: list[Message]) -> None:
        if len(alike) == 1:
            alike[0].call()
            return
        gives.append(type(alike[0]).call_joined(alike))
        for message in alike[1:]:
            message.is_shared = True

    comm = messages[0].comm
    wait = comm.start_side_by_side([partial(call, alike) for alike in kinds.values()])

    def finish() -> None:
        wait()
        for give in gives:
            give()

    return finish


def _bytes_of(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes (m,)."""
    return x.view(-1).view(torch.uint8)


def _split(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the parts of ``x`` (m,) as bytes."""
    parts: tuple[Tensor, ...] = _bytes_of(x).split([size * x.element_size() for size in sizes])
    return parts
