"""Sum entries in regions of the vector, one per rank, and gather the sums."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from micro.codecs import coding
from micro.codecs.indices import Int32, Spans
from micro.comm.ranks import Kind
from micro.comm.requests import AllGatherLists, AllToAll, Reduction
from micro.exchanges.base import Transport, decoded, gather_indices
from micro.exchanges.predicted_traffic import Choice
from micro.predicted_traffic import COUNT_BYTES, Calls
from micro.values.finite import on_device
from micro.values.sparse import Selection, SparseValues, equal_slices, summed_lists


def add_up(entries: SparseValues, regions: Spans, transport: Transport) -> Reduction[tuple[SparseValues, SparseValues]]:
    """Send every entry to the rank that owns its region.

    Returns:
        the entries as their receivers decode them; the sums in this rank's region, added in rank order.
    """
    n, own = transport.comm.world_size, regions[transport.comm.rank]
    ends = on_device([stop for _, stop in regions], torch.int32, entries.indices.device)
    sizes = torch.searchsorted(entries.indices, ends, out_int32=True)
    sizes[1:] -= sizes[:-1].clone()
    received = yield AllToAll(mine=sizes, sizes=[1] * n, received=[1] * n, kind="counts")
    leaving, coming = torch.stack([sizes, received]).tolist()  # host sync: list lengths shape the next message
    sent, parts = yield from _scatter(entries, (leaving, coming), (regions, (own,) * n), transport)
    return sent, summed_lists(parts, coming)


def add_up_calls(choice: Choice, entries: float) -> Calls:
    """Return the collectives of `add_up` for so many ``entries`` per rank, spread evenly over the regions."""
    n = choice.world_size
    pairs = choice.indices(entries / n, choice.numel / n) + choice.values(entries / n)
    return ("scatter", COUNT_BYTES * (n - 1)), ("scatter", (n - 1) * pairs)


def gather_sums(
    mine: SparseValues, held: list[int], boundaries: Sequence[int], balance: float | None, transport: Transport
) -> Reduction[SparseValues]:
    """Return all regions' chosen sums, ascending; if one rank holds far too many, they are spread first.

    Args:
        mine: the chosen sums of this rank's region.
        held: how many each rank holds.
        boundaries: of the regions, world_size + 1 of them.
        balance: the most that a region may hold, relative to the mean; None: any number.
    """
    spans, numel, n = tuple(pairwise(boundaries)), boundaries[-1], transport.comm.world_size
    if balance is not None and max(held) * n > balance * sum(held):
        mine, held = yield from _spread(mine, held, spans, transport)
        spans = ((0, numel),) * n
    chosen = Selection(mine.indices, spans=spans)
    indices = yield from gather_indices(chosen, tuple(held), numel, transport)
    return SparseValues(indices, (yield AllGatherLists(mine=mine.values, counts=held, kind="values")))


def gather_sums_calls(choice: Choice) -> Calls:
    """Return the collectives of `gather_sums` if regions hold about equally many."""
    held = choice.kept / choice.world_size
    indices = choice.indices(held, choice.numel / choice.world_size)
    return ("gather_lists", indices), ("gather_lists", choice.values(held))


def _spread(
    mine: SparseValues, held: list[int], regions: Spans, transport: Transport
) -> Reduction[tuple[SparseValues, list[int]]]:
    """Move entries between ranks, in order, until their counts differ by at most one.

    Args:
        mine: entries of this rank's region.
        held: number of entries per rank.
    """
    n, rank = transport.comm.world_size, transport.comm.rank
    before, after = list(pairwise([0, *accumulate(held)])), equal_slices(sum(held), n)
    leaving, coming = (
        [_overlap_length(before[rank], part) for part in after],
        [_overlap_length(part, after[rank]) for part in before],
    )
    _, moved = yield from _scatter(mine, (leaving, coming), ((regions[rank],) * n, regions), transport)
    return moved, [stop - start for start, stop in after]


def _overlap_length(one: tuple[int, int], other: tuple[int, int]) -> int:
    """Return the length of the overlap of two ranges."""
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def _scatter(
    entries: SparseValues, sizes: tuple[list[int], list[int]], spans: tuple[Spans, Spans], transport: Transport
) -> Reduction[tuple[SparseValues, SparseValues]]:
    """Send consecutive pieces of a list to the ranks, each as one message with its indices, then its values.

    Args:
        sizes: number of entries to each rank, and from each rank.
        spans: the range of the vector that contains the entries to each rank, and from each rank.
    Returns:
        the entries as their receivers decode them; the entries received, in rank order.
    """
    (leaving, coming), (there, here), dtype = sizes, spans, entries.values.dtype
    form, codec, comm = transport.wire.indices, transport.wire.values, transport.comm
    if isinstance(form, Int32) and codec.lossless:
        return entries, (yield from _scatter_rows(entries, leaving, coming, transport))
    lists = zip(entries.indices.split(leaving), there, strict=True)
    places = [form.encode(part - start, stop - start) for part, (start, stop) in lists]
    parts = enumerate(entries.values.split(leaving))
    wires = [coding.encode(codec, part, (*transport.key, rank)) for rank, part in parts]
    message = torch.cat([piece for pair in zip(places, wires, strict=True) for piece in pair])
    leaving_bytes = [place.numel() + wire.numel() for place, wire in zip(places, wires, strict=True)]
    lengths = [(form.num_bytes(k, b - a), codec.num_bytes(k, dtype)) for k, (a, b) in zip(coming, here, strict=True)]
    away = sum(place.numel() for rank, place in enumerate(places) if rank != comm.rank)
    coming_bytes = list(map(sum, lengths))
    arrived = yield AllToAll(mine=message, sizes=leaving_bytes, received=coming_bytes, bytes_by_kind={"indices": away})
    pieces = arrived.split([length for pair in lengths for length in pair])
    received = zip(pieces[::2], coming, here, strict=True)
    indices = torch.cat([form.decode(place, count, b - a) + a for place, count, (a, b) in received])
    if not codec.lossless:
        entries = SparseValues(entries.indices, decoded(codec, wires, leaving, dtype))
    return entries, SparseValues(indices, decoded(codec, pieces[1::2], coming, dtype))


def _scatter_rows(
    entries: SparseValues, leaving: list[int], coming: list[int], transport: Transport
) -> Reduction[SparseValues]:
    """Send entries as (index, value) rows, without splitting lists; return the received ones."""
    dtype, comm = entries.values.dtype, transport.comm
    width = 1 + dtype.itemsize // 4
    row = torch.cat([entries.indices.view(-1, 1), entries.values.view(torch.int32).view(-1, width - 1)], 1)
    sizes, received_sizes = ([width * count for count in counts] for counts in (leaving, coming))
    of_indices: dict[Kind, float] = {"indices": 4 * (entries.indices.numel() - leaving[comm.rank])}
    arrived = yield AllToAll(mine=row.view(-1), sizes=sizes, received=received_sizes, bytes_by_kind=of_indices)
    received = arrived.view(-1, width)
    indices, values = (
        column.clone(memory_format=torch.contiguous_format) for column in (received[:, 0], received[:, 1:])
    )
    return SparseValues(indices, values.view(dtype).view(-1))
