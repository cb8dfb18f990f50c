"""Counts, indices and values of all ranks gathered: what exchanges are made of, each with what it sends."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from micro.codecs import coding
from micro.codecs.base import Codec
from micro.codecs.indices import Int32
from micro.comm.requests import AllGather, AllGatherLists, Broadcast, Once, Reduction, known
from micro.exchanges.base import Transport
from micro.exchanges.predicted_traffic import Choice
from micro.predicted_traffic import COUNT_BYTES, Call, Calls
from micro.values.finite import Finite, flag_of
from micro.values.on_device import on_device
from micro.values.sparse import Overlap, Selection


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
    chosen: Tensor, *, is_finite: Finite, extra: Tensor | None = None, counts: tuple[int, ...] | None = None
) -> Reduction[Header]:
    """Gather counts of indices, whether gradients were finite, and m extra integers each: 4 (m + 2) (n-1) bytes.

    Args:
        chosen: (count,) indices, or values, that this rank chose.
        is_finite: whether this rank's gradient was.
        extra: (m,) of any integer type, equally long on all ranks.
        counts: of all ranks, where they are known already: an accelerator is not read then, unless there is an extra.
    """
    if isinstance(is_finite, Tensor):
        row = torch.cat([count_of(chosen), flag_of(is_finite, torch.int32, chosen.device)])
    else:
        row = on_device([chosen.numel(), int(is_finite)], torch.int32, chosen.device)
    row = row if extra is None else torch.cat([row, extra.to(torch.int32)])
    gathered = yield AllGather(mine=row)
    if counts is not None and extra is None and not gathered.is_cpu:
        return Header(counts, gathered[:, 1].all(), [[] for _ in counts])
    (gathered,) = yield from known(gathered)  # list lengths shape what follows
    header: Header = yield Once(work=lambda: _header(gathered.tolist()))
    return header


def header_call(num_extras: int = 0) -> Call:
    """Return what `gather_header` calls."""
    return "gather_rows", COUNT_BYTES * (2 + num_extras)


def _header(rows: list[list[int]]) -> Header:
    return Header(tuple(row[0] for row in rows), all(row[1] for row in rows), [row[2:] for row in rows])


def count_of(chosen: Tensor) -> Tensor:
    """Return the number of elements as a message (1,) int32."""
    return on_device([chosen.numel()], torch.int32, chosen.device)


def gather_counts(selection: Selection) -> Reduction[tuple[int, ...]]:
    """Return how many indices each rank chose, by a collective only where the selection does not say."""
    if selection.counts is not None:
        return selection.counts
    (gathered,) = yield from known((yield AllGather(mine=count_of(selection.indices))))  # lengths shape what follows
    counts: tuple[int, ...] = yield Once(work=lambda: tuple(gathered.view(-1).tolist()))
    return counts


def counts_calls(choice: Choice) -> Calls:
    """Return what `gather_counts` calls."""
    return () if choice.knows_counts else (("gather_rows", COUNT_BYTES),)


def gather_indices(
    selection: Selection, counts: tuple[int, ...], numel: int, transport: Transport
) -> Reduction[Tensor]:
    """Return what each rank chose, one list after the other in rank order; one list where all hold, or get, the same.

    Each list is (counts[rank],) long; nothing travels where all ranks know them already.
    """
    comm, codec = transport.comm, transport.wire.indices
    if transport.overlap is Overlap.SAME or comm.world_size == 1:
        return selection.indices
    if transport.overlap is Overlap.LEADER:
        return (yield from _from_leader(selection, counts, numel, transport))
    is_plain = isinstance(codec, Int32)  # a shorter range makes it no shorter
    spans = (None if is_plain else selection.spans) or ((0, numel),) * comm.world_size
    start, stop = spans[comm.rank]
    mine = codec.encode(selection.indices - start if start else selection.indices, stop - start)
    sizes = yield Once(
        work=lambda: [codec.num_bytes(count, b - a) for count, (a, b) in zip(counts, spans, strict=True)]
    )
    received = yield AllGatherLists(mine=mine, counts=sizes, kind="indices")

    def decode() -> Tensor:
        if is_plain:
            return codec.decode(received, sum(counts), numel)
        lists = zip(received.split(sizes), counts, spans, strict=True)
        return torch.cat([codec.decode(wire, count, b - a) + a for wire, count, (a, b) in lists])

    indices: Tensor = yield Once(work=decode)
    return indices


def _from_leader(selection: Selection, counts: Sequence[int], numel: int, transport: Transport) -> Reduction[Tensor]:
    """Return the one list that was chosen, received from the rank that chose it."""
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


def indices_calls(choice: Choice) -> Calls:
    """Return what `gather_indices` calls."""
    if choice.knows_indices:
        return ()
    if choice.overlap is Overlap.LEADER:
        return (("broadcast", choice.indices(choice.total, choice.numel)),)
    span = choice.numel / choice.world_size if choice.has_ranges else choice.numel
    return (("gather_lists", choice.indices(choice.sent, span)),)


def gather_values(encoded: Tensor, counts: Sequence[int], codec: Codec, dtype: torch.dtype) -> Reduction[Tensor]:
    """Return every rank's values, of which it gives the ``encoded`` ones, one list after the other in rank order."""
    sizes = yield Once(work=lambda: [codec.num_bytes(count, dtype) for count in counts])
    received = yield AllGatherLists(mine=encoded, counts=sizes, kind="values")
    if codec.lossless:  # values as they are: what follows each other is one list
        return codec.decode(received, sum(counts), dtype)
    values: Tensor = yield Once(work=lambda: decoded(codec, received.split(sizes), counts, dtype))
    return values


def decoded(codec: Codec, wires: Sequence[Tensor], counts: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the values of several messages, one list after the other."""
    return torch.cat([coding.decode(codec, wire, count, dtype) for wire, count in zip(wires, counts, strict=True)])


def values_call(choice: Choice) -> Call:
    """Return what `gather_values` calls."""
    return "gather_lists", choice.values(choice.sent)
