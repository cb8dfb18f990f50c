"""The base class of exchanges, and the all-gathers of counts, indices and values that they share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor

from micro.codecs import coding
from micro.codecs.base import Codec, Key
from micro.codecs.indices import IndexCodec, Int32
from micro.codecs.raw import Raw
from micro.comm.ranks import Comm
from micro.comm.requests import AllGather, AllGatherLists, Broadcast, Once, Reduction, known
from micro.parts import NoState, StatefulPart
from micro.predicted_traffic import COUNT_BYTES, Call, Calls
from micro.values.finite import on_device
from micro.values.sparse import Exchanged, Overlap, Selection, Step

if TYPE_CHECKING:
    from micro.exchanges.predicted_traffic import Choice

__all__ = ["Exchange", "Needs", "NoState", "Transport", "Wire"]

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Wire:
    """The codecs of values and indices."""

    values: Codec = field(default_factory=Raw)
    indices: IndexCodec = field(default_factory=Int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """What an exchange needs to send one step's selection.

    Attributes:
        comm: the ranks. All make the same requests in the same order.
        step: equal on all ranks, except for whether this rank's gradient was finite, which is sent too.
        overlap: how the ranks' index sets relate.
        wire: the codecs of values and indices.
    """

    comm: Comm
    step: Step
    overlap: Overlap
    wire: Wire

    @property
    def key(self) -> Key:
        """The seed of random rounding on this rank."""
        return self.step.seed, self.step.index, self.comm.rank


class Needs(Flag):
    """What an exchange requires of the other parts of a method."""

    NOTHING = 0
    RAW_VALUES = auto()  # it sends unencoded values: only the codec `Raw` works
    INT32_INDICES = auto()
    NO_MOMENTUM = auto()  # a rank also sends entries that it did not choose; these would keep their momentum
    NO_MOMENTUM_WITH_CODES = auto()  # the same, if a codec rounds


class Exchange(StatefulPart[S], ABC):
    """Combines the ranks' selections into one mean update, equal bit for bit on all ranks.

    A subclass lists in ``accepts`` how index sets may overlap, and in ``needs`` its other requirements.
    """

    kind: ClassVar[str] = "exchange"
    home: ClassVar[str] = "micro.exchanges"
    group: ClassVar[str] = "micro.exchanges"
    accepts: ClassVar[frozenset[Overlap]]
    needs: ClassVar[Needs] = Needs.NOTHING
    sends_to_all: ClassVar[bool] = False  # whether all other ranks receive a rank's encoded values

    @property
    def label(self) -> str:
        """The name, with the rule if there are several, for error messages."""
        return f"{self.name} (rule {self.rule_name})" if self.rule_name else self.name

    def check_wire(self, wire: Wire) -> None:
        """Raise ValueError if the exchange does not support these codecs."""
        if Needs.RAW_VALUES in self.needs and not wire.values.lossless:
            raise ValueError(f"exchange {self.label} sends unencoded values, got codec {wire.values.name}: use raw")
        if Needs.INT32_INDICES in self.needs and not isinstance(wire.indices, Int32):
            raise ValueError(
                f"exchange {self.label} has its own encoding of indices, got {wire.indices.name}: use int32"
            )

    @abstractmethod
    def exchange(self, state: S, acc: Tensor, selection: Selection, transport: Transport) -> Reduction[Exchanged]:
        """Yield requests to the other ranks; return the mean update and this rank's contribution to it.

        Args:
            state: this exchange's state; may be changed.
            acc: (numel,) gradient + residual. Not modified.
            selection: what this rank chose.
        """

    def volume(self, choice: "Choice") -> tuple[Calls, float]:
        """Return the collectives of ``exchange`` for this choice, in order, and the number of indices in the update.

        Raises:
            ValueError: the exchange does not predict it.
        """
        raise ValueError(f"exchange {self.name} does not predict what it sends: implement its method volume")


def count_of(chosen: Tensor) -> Tensor:
    """Return the number of elements as a message (1,) int32."""
    return on_device([chosen.numel()], torch.int32, chosen.device)


def gather_counts(selection: Selection) -> Reduction[tuple[int, ...]]:
    """Return how many indices each rank chose; sends a message only if the selection does not know it."""
    if selection.counts is not None:
        return selection.counts
    (gathered,) = yield from known((yield AllGather(mine=count_of(selection.indices))))  # lengths shape what follows
    counts: tuple[int, ...] = yield Once(work=lambda: tuple(gathered.view(-1).tolist()))
    return counts


def counts_calls(choice: "Choice") -> Calls:
    """Return the collectives of `gather_counts`."""
    return () if choice.knows_counts else (("gather_rows", COUNT_BYTES),)


def gather_indices(
    selection: Selection, counts: tuple[int, ...], numel: int, transport: Transport
) -> Reduction[Tensor]:
    """Return all ranks' indices concatenated in rank order, or a single list if all ranks hold or receive the same.

    Each list has length counts[rank]. Nothing is sent if all ranks already know the indices.
    """
    comm, codec = transport.comm, transport.wire.indices
    if transport.overlap is Overlap.SAME or comm.world_size == 1:
        return selection.indices
    if transport.overlap is Overlap.LEADER:
        return (yield from _from_leader(selection, counts, numel, transport))
    if isinstance(codec, Int32):  # a shorter range makes it no shorter, and one list follows the other
        plain: Tensor = yield AllGatherLists(mine=selection.indices, counts=counts, kind="indices")
        return plain
    spans = selection.spans or ((0, numel),) * comm.world_size
    start, stop = spans[comm.rank]
    mine = codec.encode(selection.indices - start if start else selection.indices, stop - start)
    sizes = yield Once(
        work=lambda: [codec.num_bytes(count, b - a) for count, (a, b) in zip(counts, spans, strict=True)]
    )
    received = yield AllGatherLists(mine=mine, counts=sizes, kind="indices")

    def decode() -> Tensor:
        lists = zip(received.split(sizes), counts, spans, strict=True)
        return torch.cat([codec.decode(wire, count, b - a) + a for wire, count, (a, b) in lists])

    indices: Tensor = yield Once(work=decode)
    return indices


def _from_leader(selection: Selection, counts: Sequence[int], numel: int, transport: Transport) -> Reduction[Tensor]:
    """Return the indices that the leader chose and broadcasts."""
    comm, codec = transport.comm, transport.wire.indices
    leader = max(range(comm.world_size), key=lambda rank: counts[rank])
    count = counts[leader]
    if not count:  # the leader chose nothing: there is nothing to broadcast
        return selection.indices
    if comm.rank == leader:
        blob = codec.encode(selection.indices, numel)
    else:
        blob = torch.empty(codec.num_bytes(count, numel), dtype=torch.uint8, device=selection.indices.device)
    received = yield Broadcast(mine=blob, source=leader, kind="indices")
    return codec.decode(received, count, numel)


def indices_calls(choice: "Choice") -> Calls:
    """Return the collectives of `gather_indices`."""
    if choice.knows_indices:
        return ()
    if choice.overlap is Overlap.LEADER:
        return (("broadcast", choice.indices(choice.total, choice.numel)),)
    span = choice.numel / choice.world_size if choice.has_ranges else choice.numel
    return (("gather_lists", choice.indices(choice.sent, span)),)


def gather_values(encoded: Tensor, counts: Sequence[int], codec: Codec, dtype: torch.dtype) -> Reduction[Tensor]:
    """Return all ranks' values concatenated in rank order; this rank sends its ``encoded`` ones."""
    sizes = yield Once(work=lambda: [codec.num_bytes(count, dtype) for count in counts])
    received = yield AllGatherLists(mine=encoded, counts=sizes, kind="values")
    if codec.lossless:  # unencoded: the concatenated messages are the values
        return codec.decode(received, sum(counts), dtype)
    values: Tensor = yield Once(work=lambda: decoded(codec, received.split(sizes), counts, dtype))
    return values


def decoded(codec: Codec, wires: Sequence[Tensor], counts: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the concatenated values of several messages."""
    return torch.cat([coding.decode(codec, wire, count, dtype) for wire, count in zip(wires, counts, strict=True)])


def values_call(choice: "Choice") -> Call:
    """Return the collective of `gather_values`."""
    return "gather_lists", choice.values(choice.sent)
