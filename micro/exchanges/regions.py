"""Regions of the vector, one for each rank, which adds up what all ranks send of it."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from micro.codecs import coding
from micro.codecs import indices as forms
from micro.codecs.indices import Int32
from micro.codecs.raw import Raw
from micro.exchanges.base import Transport, Wire
from micro.exchanges.gathering import decode_lists, gather_indices
from micro.exchanges.traffic import Choice
from micro.on_device import on_device
from micro.partition import equal_slice
from micro.requests import AllGatherLists, AllToAll, Reduction
from micro.sparse import Selection, SparseValues, summed_lists
from micro.traffic import COUNT_BYTES, Calls

Spans = Sequence[tuple[int, int]]  # (start, stop) of one region for each rank


def add_up(entries: SparseValues, regions: Spans, transport: Transport) -> Reduction[tuple[SparseValues, SparseValues]]:
    """Send every entry to the rank in whose region it lies.

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
    """Return what `add_up` calls for so many entries of each rank, which lie evenly over the regions."""
    n = choice.world_size
    pairs = choice.indices(entries / n, choice.numel / n) + choice.values(entries / n)
    return ("scatter", COUNT_BYTES * (n - 1)), ("scatter", (n - 1) * pairs)


def gather_sums(
    mine: SparseValues, held: list[int], boundaries: Sequence[int], balance: float | None, transport: Transport
) -> Reduction[SparseValues]:
    """Return all regions' chosen sums, ascending; spread over the ranks before where one holds far too many.

    Args:
        mine: the chosen sums of this rank's region.
        held: how many each rank holds.
        boundaries: where regions begin and end, world_size + 1 of them.
        balance: most that a region may hold, in units of the mean; None: any number.
    """
    spans, numel, n = tuple(pairwise(boundaries)), boundaries[-1], transport.comm.world_size
    if balance is not None and max(held) * n > balance * sum(held):
        mine, held = yield from _spread(mine, held, spans, transport)
        spans = ((0, numel),) * n
    chosen = Selection(mine.indices, spans=spans)
    indices = yield from gather_indices(chosen, tuple(held), numel, transport)
    return SparseValues(indices, (yield AllGatherLists(mine=mine.values, counts=held, kind="values")))


def gather_sums_calls(choice: Choice) -> Calls:
    """Return what `gather_sums` calls, where regions hold about as many."""
    held = choice.kept / choice.world_size
    indices = choice.indices(held, choice.numel / choice.world_size)
    return ("gather_lists", indices), ("gather_lists", choice.values(held))


def _spread(
    mine: SparseValues, held: list[int], regions: Spans, transport: Transport
) -> Reduction[tuple[SparseValues, list[int]]]:
    """Move entries to neighbouring ranks, their order kept, until all hold as many, give or take one.

    Args:
        mine: of this rank's region; ``held`` has how many each rank holds.
    """
    n, rank, total = transport.comm.world_size, transport.comm.rank, sum(held)
    starts = [0, *accumulate(held)]
    slices = [equal_slice(total, n, part) for part in range(n)]
    leaving = [_shared((starts[rank], starts[rank + 1]), part) for part in slices]
    coming = [_shared((starts[other], starts[other + 1]), slices[rank]) for other in range(n)]
    _, moved = yield from _scatter(mine, (leaving, coming), ((regions[rank],) * n, regions), transport)
    return moved, [stop - start for start, stop in slices]


def _shared(one: tuple[int, int], other: tuple[int, int]) -> int:
    """Return how many places two ranges share."""
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def _scatter(
    entries: SparseValues, sizes: tuple[list[int], list[int]], spans: tuple[Spans, Spans], transport: Transport
) -> Reduction[tuple[SparseValues, SparseValues]]:
    """Send neighbouring pieces of a list to the ranks in turn.

    Args:
        sizes: how many entries go to each rank, and how many come from each.
        spans: in which range of the vector the entries for each rank lie, and those from each.
    Returns:
        the entries as their receivers decode them; what the ranks sent to this one, in turn.
    """
    (leaving, coming), (there, here), dtype, wire = sizes, spans, entries.values.dtype, transport.wire
    form, codec = wire.indices, wire.values
    if isinstance(form, Int32) and isinstance(codec, Raw) and dtype.itemsize % 4 == 0:
        return entries, (yield from _scatter_rows(entries, leaving, coming, transport))
    wires = _encoded(entries.values, leaving, transport)
    places = forms.encode_lists(form, entries.indices, leaving, there)
    lengths = _lengths(wire, leaving, there, dtype), _lengths(wire, coming, here, dtype)
    received = yield from _scatter_pairs(places, wires, lengths, transport)
    if not codec.lossless:
        entries = SparseValues(entries.indices, decode_lists(wires, leaving, codec, dtype))
    indices = forms.decode_lists(form, received[0], coming, here)
    return entries, SparseValues(indices, decode_lists(received[1], coming, codec, dtype))


def _scatter_rows(
    entries: SparseValues, leaving: list[int], coming: list[int], transport: Transport
) -> Reduction[SparseValues]:
    """Send entries as rows of an index and a value, so that no list needs to be cut; return what was received."""
    dtype, comm = entries.values.dtype, transport.comm
    width = 1 + dtype.itemsize // 4
    row = torch.cat([entries.indices.view(-1, 1), entries.values.view(torch.int32).view(-1, width - 1)], 1)
    sizes, received_sizes = ([width * count for count in counts] for counts in (leaving, coming))
    arrived = yield AllToAll(mine=row.view(-1), sizes=sizes, received=received_sizes, kind="values")
    received = arrived.view(-1, width)
    if comm.world_size > 1:
        comm.traffic.move(4 * (entries.indices.numel() - leaving[comm.rank]), "values", "indices")
    indices, values = (
        column.clone(memory_format=torch.contiguous_format) for column in (received[:, 0], received[:, 1:])
    )
    return SparseValues(indices, values.view(dtype).view(-1))


def _encoded(values: Tensor, counts: list[int], transport: Transport) -> Tensor:
    """Return the messages of lists of values, one after the other; each list of a codec has its own key."""
    codec, key = transport.wire.values, transport.key
    if codec.lossless:
        return coding.encode(codec, values, key)
    return torch.cat([coding.encode(codec, part, (*key, rank)) for rank, part in enumerate(values.split(counts))])


def _lengths(wire: Wire, counts: list[int], spans: Spans, dtype: torch.dtype) -> list[int]:
    """Return the bytes of indices and of values of each list, in turn."""
    both = (
        (wire.indices.num_bytes(count, stop - start), wire.values.num_bytes(count, dtype))
        for count, (start, stop) in zip(counts, spans, strict=True)
    )
    return [length for pair in both for length in pair]


def _scatter_pairs(
    places: Tensor, wires: Tensor, lengths: tuple[list[int], list[int]], transport: Transport
) -> Reduction[list[Tensor]]:
    """Send to each rank its indices and then its values in one message; return all indices and all values received.

    Args:
        places, wires: (bytes,) uint8, those for each rank one after the other.
        lengths: of what leaves and of what comes; see `_lengths`.
    """
    comm, (leaving, coming) = transport.comm, lengths
    pairs = zip(places.split(leaving[::2]), wires.split(leaving[1::2]), strict=True)
    message = torch.cat([part for pair in pairs for part in pair])
    arrived = yield AllToAll(mine=message, sizes=_in_pairs(leaving), received=_in_pairs(coming), kind="values")
    received = arrived.split(coming)
    if comm.world_size > 1:
        away = places.numel() - leaving[2 * comm.rank]
        comm.traffic.move(away, "values", "indices")
    return [torch.cat(received[::2]), torch.cat(received[1::2])]


def _in_pairs(lengths: list[int]) -> list[int]:
    return [sum(pair) for pair in zip(lengths[::2], lengths[1::2], strict=True)]
