"""What travels between the ranks of a process group: the only file that starts the collectives of steps.

Messages of one kind that are due at the same time are joined: one collective carries all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

LARGE_BYTES = 1 << 20  # a sum of this size travels alone: to copy it costs more than a collective


@dataclass(slots=True, kw_only=True)
class Message(ABC):
    """One collective, by the tensors that it reads and fills.

    Attributes:
        received: what it fills.
    """

    received: Tensor

    @property
    def joins(self) -> Hashable:
        """What is equal for messages that can travel as one; the same on all ranks."""
        return type(self)

    @abstractmethod
    def start(self, group: dist.ProcessGroup | None) -> Any:
        """Start the collective."""

    @classmethod
    @abstractmethod
    def joined(cls, messages: Sequence[Self]) -> Self:
        """Return one message that carries all of these."""

    @abstractmethod
    def deal(self, messages: Sequence[Self]) -> None:
        """Give the messages that this one has carried what they were to receive."""


@dataclass(slots=True, kw_only=True)
class Rows(Message):
    """An all-gather: ``received`` (world_size, m) becomes every rank's ``row`` (m,)."""

    row: Tensor

    @classmethod
    def of(cls, row: Tensor, world_size: int) -> Self:
        """Return the message of a row."""
        row = row.contiguous()
        return cls(received=row.new_empty((world_size, row.numel())), row=row)

    def start(self, group: dist.ProcessGroup | None) -> Any:
        """Start the collective."""
        return all_gather_single()(self.received.view(-1), self.row, group=group, async_op=True)

    @classmethod
    def joined(cls, messages: Sequence[Self]) -> Self:
        """Return the rows one after the other, as bytes."""
        return cls.of(torch.cat([_bytes_of(message.row) for message in messages]), len(messages[0].received))

    def deal(self, messages: Sequence[Self]) -> None:
        """Split the rows."""
        parts = self.received.split([message.row.nbytes for message in messages], dim=1)
        for message, part in zip(messages, parts, strict=True):
            _bytes_of(message.received).view(part.shape).copy_(part)


@dataclass(slots=True, kw_only=True)
class Parts(Message):
    """An all-to-all: each rank gets a part of ``sent``, and ``received`` becomes what all send to this one."""

    sent: Tensor
    received_sizes: list[int]
    sent_sizes: list[int]

    def start(self, group: dist.ProcessGroup | None) -> Any:
        """Start the collective."""
        sizes = self.received_sizes, self.sent_sizes
        return dist.all_to_all_single(self.received, self.sent, *sizes, group=group, async_op=True)

    @classmethod
    def joined(cls, messages: Sequence[Self]) -> Self:
        """Return for each rank its parts of all messages, one after the other, as bytes."""
        sent = [_split(message.sent, message.sent_sizes) for message in messages]
        received = [_split(message.received, message.received_sizes) for message in messages]
        sent_sizes, received_sizes = (
            [sum(part.numel() for part in of_rank) for of_rank in zip(*parts, strict=True)]
            for parts in (sent, received)
        )
        whole = torch.cat([part for of_rank in zip(*sent, strict=True) for part in of_rank])
        arrived = whole.new_empty(sum(received_sizes))
        return cls(received=arrived, sent=whole, received_sizes=received_sizes, sent_sizes=sent_sizes)

    def deal(self, messages: Sequence[Self]) -> None:
        """Split what came from each rank."""
        received = [_split(message.received, message.received_sizes) for message in messages]
        targets = [part for of_rank in zip(*received, strict=True) for part in of_rank]
        for target, part in zip(targets, self.received.split([part.numel() for part in targets]), strict=True):
            target.copy_(part)


@dataclass(slots=True, kw_only=True)
class Sum(Message):
    """An all-reduce of ``received``, in place."""

    @property
    def joins(self) -> Hashable:
        """Sums of one dtype travel together, unless they are large."""
        return Sum, self.received.dtype, id(self) if self.received.nbytes >= LARGE_BYTES else None

    def start(self, group: dist.ProcessGroup | None) -> Any:
        """Start the collective."""
        return dist.all_reduce(self.received, group=group, async_op=True)

    @classmethod
    def joined(cls, messages: Sequence[Self]) -> Self:
        """Return all vectors as one."""
        return cls(received=torch.cat([message.received.reshape(-1) for message in messages]))

    def deal(self, messages: Sequence[Self]) -> None:
        """Split the sum."""
        parts = self.received.split([message.received.numel() for message in messages])
        for message, part in zip(messages, parts, strict=True):
            message.received.copy_(part.view(message.received.shape))


@dataclass(slots=True, kw_only=True)
class Copies(Message):
    """A broadcast of rank ``source``'s ``received`` to all, in place."""

    source: int

    @property
    def joins(self) -> Hashable:
        """Copies from one rank travel together."""
        return Copies, self.source

    def start(self, group: dist.ProcessGroup | None) -> Any:
        """Start the collective."""
        return dist.broadcast(self.received, group_src=self.source, group=group, async_op=True)

    @classmethod
    def joined(cls, messages: Sequence[Self]) -> Self:
        """Return all as one, as bytes."""
        whole = torch.cat([_bytes_of(message.received) for message in messages])
        return cls(received=whole, source=messages[0].source)

    def deal(self, messages: Sequence[Self]) -> None:
        """Split what came."""
        for message, part in zip(messages, self.received.split([m.received.nbytes for m in messages]), strict=True):
            _bytes_of(message.received).copy_(part)


def all_gather_single() -> Callable[..., Any]:
    """Return torch's equal-size all-gather under the name that this version has (renamed in torch 2.13)."""
    named: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return named


def _bytes_of(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes (m,)."""
    return x.view(-1).view(torch.uint8)


def _split(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the parts of ``x`` (m,) as bytes."""
    parts: tuple[Tensor, ...] = _bytes_of(x).split([size * x.element_size() for size in sizes])
    return parts


def mean_async(x: Tensor, group: dist.ProcessGroup | None) -> torch.futures.Future[Tensor]:
    """Start to replace ``x`` by its mean over the ranks, as DDP does where it has no hook; return the future of x."""
    work = dist.all_reduce(x.div_(dist.get_world_size(group)), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
