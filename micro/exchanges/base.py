"""What an exchange is: HOW the ranks' indices and values become one update."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from micro.codecs.base import Codec, Key
from micro.codecs.messages import Messages, equal_messages
from micro.codecs.raw import Raw
from micro.comm import Comm
from micro.health import Finite, all_finite, flag_of, is_zero, soonest
from micro.index_codecs import IndexCodec, Int32
from micro.on_device import on_device
from micro.partition import equal_sizes, equal_slices
from micro.parts import NoState, StatefulPart
from micro.requests import AllGather, AllGatherLists, AllReduce, AllToAll, Broadcast, Fill, Once, Reduction
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, Step

__all__ = ["Exchange", "NoState", "Wire"]

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Wire:
    """The forms in which values and indices travel."""

    values: Codec = field(default_factory=Raw)
    indices: IndexCodec = field(default_factory=Int32)


class Exchange(StatefulPart[S], ABC):
    """A way in which the ranks' selections become one mean update, equal bit for bit on all ranks.

    A subclass says which relations of index sets it ``accepts``, and may have a state. ``encodes`` is False where
    values travel as they are: then no codec but `Raw` goes with it. ``splits`` says that calling it for each piece of
    the vector separately gives the same outcome: it sends all that was chosen, remembers nothing and uses nothing of
    the step but its number and its seed.
    """

    kind: ClassVar[str] = "exchange"
    home: ClassVar[str] = "micro.exchanges"
    group: ClassVar[str] = "micro.exchanges"
    accepts: ClassVar[frozenset[Overlap]]
    encodes: ClassVar[bool] = True
    splits: ClassVar[bool] = False

    def check_wire(self, wire: Wire) -> None:
        """Raise ValueError where values or indices cannot travel in this form."""
        if not self.encodes and not isinstance(wire.values, Raw):
            raise ValueError(f"exchange {self.name} sends values as they are, got codec {wire.values.name}: use raw")

    @abstractmethod
    def exchange(
        self,
        state: S,
        acc: Tensor,
        selection: Selection,
        *,
        step: Step,
        overlap: Overlap,
        wire: Wire,
        comm: Comm,
        is_finite: Finite,
    ) -> Reduction[Exchanged]:
        """Yield what is requested of all ranks; return the mean update and what this rank contributed to it.

        Args:
            state: this exchange's own state; may be changed.
            acc: (numel,) gradient + residual. Not modified.
            selection: what this rank chose.
            step: the same on all ranks.
            overlap: how the ranks' index sets relate.
            wire: the form of values and indices on their way.
            comm: the ranks, all of which make the same requests in the same order.
            is_finite: whether this rank's gradient was finite; sent along, so that all ranks know.
        """


@dataclass(frozen=True, slots=True)
class Header:
    """What all ranks know of each other ahead of indices and values.

    Attributes:
        counts: how many indices each rank chose.
        is_finite: whether the gradients of all ranks were finite; unread on an accelerator where counts were known.
        extras: further integers of each rank.
    """

    counts: tuple[int, ...]
    is_finite: Finite
    extras: list[list[int]]


def gather_header(
    chosen: Tensor,
    *,
    is_finite: Finite,
    extra: Tensor | None = None,
    counts: tuple[int, ...] | None = None,
) -> Reduction[Header]:
    """Gather counts of indices, whether gradients were finite, and m extra integers each: 4 (m + 2) (n-1) bytes.

    Args:
        chosen: (count,) indices, or values, that this rank chose.
        extra: (m,) of any integer type, equally long on all ranks.
        counts: of all ranks, where they are known already: an accelerator is not read then, unless there is an extra.
    """
    gathered = yield AllGather(mine=_header_row(chosen, is_finite=is_finite, extra=extra))
    if counts is not None and extra is None and gathered.device.type != "cpu":
        return Header(counts, gathered[:, 1].all(), [[] for _ in counts])
    header: Header = yield Once(work=lambda: _header(gathered.tolist()))  # host sync: list lengths shape what follows
    return header


def _header_row(chosen: Tensor, *, is_finite: Finite, extra: Tensor | None = None) -> Tensor:
    """Return what a rank sends to `gather_header`, (m + 2,) int32."""
    known = [chosen.numel(), *([] if isinstance(is_finite, Tensor) else [int(is_finite)])]
    row = on_device(known, torch.int32, chosen.device)
    if isinstance(is_finite, Tensor):
        row = torch.cat([row, flag_of(is_finite, torch.int32, chosen.device)])
    return row if extra is None else torch.cat([row, extra.to(torch.int32)])


def _header(rows: list[list[int]]) -> Header:
    return Header(tuple(row[0] for row in rows), all(row[1] for row in rows), [row[2:] for row in rows])


def count_of(entries: SparseValues) -> Tensor:
    """Return the number of entries as a message (1,) int32."""
    return on_device([entries.indices.numel()], torch.int32, entries.indices.device)


def gather_counts(selection: Selection) -> Reduction[tuple[int, ...]]:
    """Return how many indices each rank chose, by a collective only where the selection does not say."""
    if selection.counts is not None:
        return selection.counts
    mine = on_device([selection.indices.numel()], torch.int32, selection.indices.device)
    gathered = yield AllGather(mine=mine)
    counts: tuple[int, ...] = yield Once(work=lambda: tuple(gathered.view(-1).tolist()))  # host sync: list lengths
    return counts


def gather_indices(
    selection: Selection, counts: tuple[int, ...], overlap: Overlap, numel: int, codec: IndexCodec, comm: Comm
) -> Reduction[Tensor]:
    """Return what each rank chose, one list after the other in rank order; one list where all hold, or get, the same.

    Each list is (counts[rank],) long; nothing travels where all ranks know them already.
    """
    if overlap is Overlap.SAME or comm.world_size == 1:
        return selection.indices
    if selection.everyone is not None:
        return selection.everyone
    if overlap is Overlap.LEADER:
        return (yield from _from_leader(selection, counts, numel, codec, comm))
    spans = (selection.spans if codec.by_range else None) or ((0, numel),) * comm.world_size
    start, stop = spans[comm.rank]
    mine = codec.encode(selection.indices - start if start else selection.indices, stop - start)
    sizes = yield Once(
        work=lambda: [codec.num_bytes(count, b - a) for count, (a, b) in zip(counts, spans, strict=True)]
    )
    received = yield AllGatherLists(mine=mine, counts=sizes, kind="indices")
    indices: Tensor = yield Once(work=lambda: codec.decode_joined(received, counts, spans))
    return indices


def gather_values(encoded: Tensor, counts: Sequence[int], codec: Codec, dtype: torch.dtype) -> Reduction[Tensor]:
    """Return every rank's values, of which it gives the ``encoded`` ones, one list after the other in rank order."""
    sizes = yield Once(work=lambda: [codec.num_bytes(count, dtype) for count in counts])
    received = yield AllGatherLists(mine=encoded, counts=sizes, kind="values")
    if codec.lossless:
        return decode_lists(received, counts, codec, dtype)
    values: Tensor = yield Once(work=lambda: decode_lists(received, counts, codec, dtype))
    return values


def decode_lists(received: Tensor, counts: Sequence[int], codec: Codec, dtype: torch.dtype) -> Tensor:
    """Return the values (sum(counts),) of messages that lie one after the other, each of so many."""
    if codec.lossless:  # values as they are: what follows each other is one list
        return codec.decode(received, sum(counts), dtype)
    wires = received.split([codec.num_bytes(count, dtype) for count in counts])
    return torch.cat([codec.decode(*part, dtype) for part in zip(wires, counts, strict=True)])


def _from_leader(
    selection: Selection, counts: Sequence[int], numel: int, codec: IndexCodec, comm: Comm
) -> Reduction[Tensor]:
    """Return the one list that was chosen, received from the rank that chose it."""
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


def mean_of(
    values: Tensor, codec: Codec, key: Key, comm: Comm, *, is_finite: Finite
) -> Reduction[tuple[Tensor, Tensor, Finite]]:
    """Average ``values`` (k,), one entry per shared index, over the ranks.

    Whether each gradient was finite travels along: one more number in an all-reduce, one byte with encoded values.

    Args:
        key: seeds what is random about the codec; differs from rank to rank.
    Returns:
        the mean (k,), equal bit for bit on all ranks; what this rank sent as decoded (k,); whether all were finite.
    """
    if codec.lossless:
        return (yield from _mean_raw(values, comm, is_finite=is_finite))
    rest, mean = torch.empty_like(values), torch.empty_like(values)
    averaged = yield from mean_encoded_(values, codec, key, comm, is_finite=is_finite, rest=rest, mean=mean)
    return mean, values - rest, averaged.is_finite


def _mean_raw(values: Tensor, comm: Comm, *, is_finite: Finite) -> Reduction[tuple[Tensor, Tensor, Finite]]:
    flag = values.new_full((1,), 0.0 if is_finite else 1.0) if isinstance(is_finite, bool) else _bad(is_finite, values)
    mean = (yield AllReduce(mine=torch.cat([values, flag]))) / comm.world_size
    return mean[:-1], values, is_zero(mean[-1])


def _bad(is_finite: Tensor, values: Tensor) -> Tensor:
    return (~is_finite).view(1).to(values.dtype)


@dataclass(frozen=True, slots=True)
class Averaged:
    """What became of an average of encoded values.

    Attributes:
        is_finite: whether all ranks' gradients were finite, the same on all ranks.
        fits: whether the mean is finite, the same on all ranks.
        first_bad: index of this rank's first sum that is not finite or too large, where a gradient was added.
    """

    is_finite: Finite
    fits: Finite
    first_bad: int | None = None


class AverageEncoded(Protocol):
    """What averages encoded values that all ranks have at the same indices: `mean_encoded_`, or another exchange's."""

    def __call__(
        self,
        values: Tensor,
        codec: Codec,
        key: Key,
        comm: Comm,
        *,
        is_finite: Finite,
        rest: Tensor | None,
        mean: Tensor,
        memory: Tensor | None = None,
        grad: Tensor | None = None,
    ) -> Reduction[Averaged]: ...


def mean_encoded_(
    values: Tensor,
    codec: Codec,
    key: Key,
    comm: Comm,
    *,
    is_finite: Finite,
    rest: Tensor | None,
    mean: Tensor,
    memory: Tensor | None = None,
    grad: Tensor | None = None,
) -> Reduction[Averaged]:
    """Average encoded values: scatter them, add in full precision, share the encoded means; see `mean_of`.

    An all-reduce of encoded values would round at every hop, and no rank would know what was lost. Here each rank owns
    a part, adds what the others sent of it in rank order to its own values, which need no code, and counts the rounding
    of the mean as not sent, so that it stays in its residual. The bytes are those of an all-reduce of the encoded
    values.

    Args:
        values: (k,) may be the memory of ``mean``.
        rest: (k,) becomes what this rank did not send of its values; None: nobody wants to know.
        mean: (k,) becomes the mean, equal bit for bit on all ranks.
        memory: (at least `message_bytes`,) uint8 for the messages.
        grad: (k,) is added to the values while they are encoded, and used up; it may be the memory of ``mean``.
    """
    n, rank, numel = comm.world_size, comm.rank, values.numel()
    bare, flagged = (_messages(numel, codec, values.dtype, comm, gap=gap) for gap in (0, 1))
    start, stop = equal_slices(numel, n)[rank]
    memory = torch.empty(bare.num_bytes + 1, dtype=torch.uint8, device=values.device) if memory is None else memory
    leaving, message = memory[: bare.num_bytes + 1].split([bare.num_bytes - bare.sizes[rank], flagged.sizes[rank]])
    in_others = codec.encode_others_into_(values, key, leaving, bare, rank, rest, grad=grad)
    own_size, others = bare.sizes[rank], [other for other in range(n) if other != rank]
    sizes, coming = [0] * n, [0] * n
    for other in others:
        sizes[other], coming[other] = bare.sizes[other], own_size
    arrived = yield AllToAll(mine=leaving, sizes=sizes, received=coming, kind="values")
    received = arrived.view(n - 1, own_size)
    mine, own_mean = values[start:stop], mean[start:stop]
    if mine.data_ptr() == own_mean.data_ptr():
        mine = mine.clone()
    own_rest, own_grad = (None if vector is None else vector[start:stop] for vector in (rest, grad))
    fits, in_own = codec.encode_mean_into_(mine, received, (*key, n), message[:-1], own_mean, own_rest, grad=own_grad)
    bads = (in_others, None if in_own is None else start + in_own)
    first_bad = min((bad for bad in bads if bad is not None), default=None)
    message[-1] = is_finite if first_bad is None else False
    wires = yield AllGatherLists(mine=message, counts=flagged.sizes, kind="values")

    def decode_others() -> tuple[Finite, Finite]:
        fit = codec.decode_others_into_(wires, flagged, rank, mean)
        return soonest(flagged.last_bytes(wires).all()), all_finite([fits, fit])

    is_finite, fits = yield Fill(into=mean, work=decode_others)
    return Averaged(is_finite, fits, first_bad)


def _messages(numel: int, codec: Codec, dtype: torch.dtype, comm: Comm, *, gap: int) -> Messages:
    """Return the messages in which all parts of ``numel`` values travel, with so many bytes behind each."""
    parts = equal_sizes(numel, comm.world_size)
    return equal_messages(numel, len(parts), *(codec.num_bytes(parts[place], dtype) for place in (0, -1)), gap)


def message_bytes(numel: int, codec: Codec, dtype: torch.dtype, comm: Comm) -> int:
    """Return the bytes of the messages that `mean_encoded_` sends of ``numel`` values."""
    return _messages(numel, codec, dtype, comm, gap=0).num_bytes + 1
