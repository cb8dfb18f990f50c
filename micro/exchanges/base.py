"""What an exchange is: HOW the ranks' indices and values become one update."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from micro.codecs.base import Codec, Key
from micro.codecs.raw import Raw
from micro.comm import Comm
from micro.health import Finite, all_finite, flag_of, is_zero, soonest
from micro.index_codecs import IndexCodec, Int32
from micro.on_device import on_device
from micro.partition import equal_sizes
from micro.parts import NoState, StatefulPart
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
    ) -> Exchanged:
        """Return the mean update and what this rank contributed to it.

        Args:
            state: this exchange's own state; may be changed.
            acc: (numel,) gradient + residual. Not modified.
            selection: what this rank chose.
            step: the same on all ranks.
            overlap: how the ranks' index sets relate.
            wire: the form of values and indices on their way.
            comm: every rank calls the same collectives in the same order.
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
    comm: Comm,
    *,
    is_finite: Finite,
    extra: Tensor | None = None,
    counts: tuple[int, ...] | None = None,
) -> Header:
    """Gather counts of indices, whether gradients were finite, and m extra integers each: 4 (m + 2) (n-1) bytes.

    Args:
        chosen: (count,) indices, or values, that this rank chose.
        extra: (m,) of any integer type, equally long on all ranks.
        counts: of all ranks, where they are known already: an accelerator is not read then, unless there is an extra.
    """
    known = [chosen.numel(), *([] if isinstance(is_finite, Tensor) else [int(is_finite)])]
    header = on_device(known, torch.int32, chosen.device)
    if isinstance(is_finite, Tensor):
        header = torch.cat([header, flag_of(is_finite, torch.int32, chosen.device)])
    if extra is not None:
        header = torch.cat([header, extra.to(torch.int32)])
    gathered = comm.gather_rows(header)
    if counts is not None and extra is None and gathered.device.type != "cpu":
        return Header(counts, gathered[:, 1].all(), [[] for _ in counts])
    return comm.alike(lambda: _header(gathered.tolist()))  # host sync: list lengths shape the next message


def _header(rows: list[list[int]]) -> Header:
    return Header(tuple(row[0] for row in rows), all(row[1] for row in rows), [row[2:] for row in rows])


def count_of(entries: SparseValues) -> Tensor:
    """Return the number of entries as a message (1,) int32."""
    return on_device([entries.indices.numel()], torch.int32, entries.indices.device)


def gather_counts(selection: Selection, comm: Comm) -> tuple[int, ...]:
    """Return how many indices each rank chose, by a collective only where the selection does not say."""
    if selection.counts is not None:
        return selection.counts
    mine = on_device([selection.indices.numel()], torch.int32, selection.indices.device)
    gathered = comm.gather_rows(mine).view(-1)
    return comm.alike(lambda: tuple(gathered.tolist()))  # host sync: list lengths shape the next message


def gather_indices(
    selection: Selection, counts: tuple[int, ...], overlap: Overlap, numel: int, codec: IndexCodec, comm: Comm
) -> Tensor:
    """Return what each rank chose, one list after the other in rank order; one list where all hold, or get, the same.

    Each list is (counts[rank],) long; nothing travels where all ranks know them already.
    """
    if overlap is Overlap.SAME or comm.world_size == 1:
        return selection.indices
    if selection.everyone is not None:
        return selection.everyone
    if overlap is Overlap.LEADER:
        return _from_leader(selection, counts, numel, codec, comm)
    spans = (selection.spans if codec.by_range else None) or ((0, numel),) * comm.world_size
    start, stop = spans[comm.rank]
    mine = codec.encode(selection.indices - start if start else selection.indices, stop - start)
    sizes = [codec.num_bytes(count, b - a) for count, (a, b) in zip(counts, spans, strict=True)]
    received = comm.gather_joined(mine, sizes, "indices")
    return comm.alike(lambda: codec.decode_joined(received, counts, spans))


def gather_values(encoded: Tensor, counts: Sequence[int], codec: Codec, dtype: torch.dtype, comm: Comm) -> Tensor:
    """Return every rank's values, of which it gives the ``encoded`` ones, one list after the other in rank order."""
    sizes = [codec.num_bytes(count, dtype) for count in counts]
    received = comm.gather_joined(encoded, sizes, "values")
    if codec.lossless:
        return decode_lists(received, counts, codec, dtype)
    return comm.alike(lambda: decode_lists(received, counts, codec, dtype))


def decode_lists(received: Tensor, counts: Sequence[int], codec: Codec, dtype: torch.dtype) -> Tensor:
    """Return the values (sum(counts),) of messages that lie one after the other, each of so many."""
    if codec.lossless:  # values as they are: what follows each other is one list
        return codec.decode(received, sum(counts), dtype)
    wires = received.split([codec.num_bytes(count, dtype) for count in counts])
    return torch.cat([codec.decode(*part, dtype) for part in zip(wires, counts, strict=True)])


def _from_leader(selection: Selection, counts: Sequence[int], numel: int, codec: IndexCodec, comm: Comm) -> Tensor:
    """Return the one list that was chosen, received from the rank that chose it."""
    leader = max(range(comm.world_size), key=lambda rank: counts[rank])
    count = counts[leader]
    if not count:  # the leader chose nothing: there is nothing to broadcast
        return selection.indices
    if comm.rank == leader:
        blob = codec.encode(selection.indices, numel)
    else:
        blob = torch.empty(codec.num_bytes(count, numel), dtype=torch.uint8, device=selection.indices.device)
    return codec.decode(comm.broadcast_(blob, leader, "indices"), count, numel)


def mean_of(values: Tensor, codec: Codec, key: Key, comm: Comm, *, is_finite: Finite) -> tuple[Tensor, Tensor, Finite]:
    """Average ``values`` (k,), one entry per shared index, over the ranks.

    Whether each gradient was finite travels along: one more number in an all-reduce, one byte with encoded values.

    Args:
        key: seeds what is random about the codec; differs from rank to rank.
    Returns:
        the mean (k,), equal bit for bit on all ranks; what this rank sent as decoded (k,); whether all were finite.
    """
    if codec.lossless:
        return _mean_raw(values, comm, is_finite=is_finite)
    rest, mean = torch.empty_like(values), torch.empty_like(values)
    averaged = mean_encoded_(values, codec, key, comm, is_finite=is_finite, rest=rest, mean=mean)
    return mean, values - rest, averaged.is_finite


def _mean_raw(values: Tensor, comm: Comm, *, is_finite: Finite) -> tuple[Tensor, Tensor, Finite]:
    flag = values.new_full((1,), 0.0 if is_finite else 1.0) if isinstance(is_finite, bool) else _bad(is_finite, values)
    mean = comm.all_reduce_(torch.cat([values, flag])) / comm.world_size
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
    ) -> Averaged: ...


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
) -> Averaged:
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
    n, rank, counts = comm.world_size, comm.rank, equal_sizes(values.numel(), comm.world_size)
    sizes = [codec.num_bytes(count, values.dtype) for count in counts]
    memory = torch.empty(sum(sizes) + 1, dtype=torch.uint8, device=values.device) if memory is None else memory
    leaving, flagged = memory[: sum(sizes) + 1].split([sum(sizes) - sizes[rank], sizes[rank] + 1])
    parts, rests, grads = values.split(counts), _parts_of(rest, counts), _parts_of(grad, counts)
    pieces = iter(leaving.split(sizes[:rank] + sizes[rank + 1 :]))
    bads: list[int | None] = [None] * n
    for place in (*range(rank), *range(rank + 1, n)):
        bads[place] = codec.encode_into_(parts[place], (*key, place), next(pieces), rests[place], grad=grads[place])
    received = comm.scatter_to_others(leaving, sizes, "values")
    means, mine = mean.split(counts), parts[rank]
    if mine.data_ptr() == means[rank].data_ptr():
        mine = mine.clone()
    fits, bads[rank] = codec.encode_mean_into_(
        mine, received, (*key, n), flagged[:-1], means[rank], rests[rank], grad=grads[rank]
    )
    first_bad = next((sum(counts[:place]) + bad for place, bad in enumerate(bads) if bad is not None), None)
    flagged[-1] = is_finite if first_bad is None else False
    wires = comm.gather_joined(flagged, [size + 1 for size in sizes], "values").split([size + 1 for size in sizes])

    def decode_others() -> tuple[Finite, Finite]:
        others = [place for place in range(n) if place != rank]
        decoded = [codec.decode_mean_into_(wires[place][None, :-1], means[place]) for place in others]
        return soonest(torch.stack([wire[-1] for wire in wires]).all()), all_finite([fits, *decoded])

    return Averaged(*comm.fill_alike_(mean, decode_others), first_bad)


def _parts_of(vector: Tensor | None, counts: Sequence[int]) -> Sequence[Tensor | None]:
    return [None] * len(counts) if vector is None else vector.split(list(counts))


def message_bytes(numel: int, codec: Codec, dtype: torch.dtype, comm: Comm) -> int:
    """Return the bytes of the messages that `mean_encoded_` sends of ``numel`` values."""
    return sum(codec.num_bytes(count, dtype) for count in equal_sizes(numel, comm.world_size)) + 1
