"""The k largest sums of all regions in one all-gather: each rank sends its largest, as many as may well suffice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from micro import kernels
from micro.exchanges.base import Header
from micro.exchanges.moving_regions import OktopkState, RegionStep
from micro.exchanges.regions import Transport
from micro.health import flag_of
from micro.index_codecs import Int32
from micro.kernels import reference
from micro.on_device import on_device
from micro.sparse import Padded, SparseValues

HEAD = 4  # numbers ahead: the choice's count, the finite flag, the region's sums, and one to keep values aligned
ROOTS = 1.5  # of the most that a region gave, of room beyond it: a count x differs by chance by about sqrt(2 x)
FULLEST = 1.75  # times what a region gives in the mean
LEAST, MOST, LESS = 0.1, 1.6, 0.97  # share of room beyond that; doubled by a row that was too small, then falling


def capacity_after(state: OktopkState, k: int, transport: Transport) -> int | None:
    """Return how many sums a row has room for, from what each region gave in the last step: an even number.

    None, on all ranks alike, where nothing is known of it, where indices are packed, or where rows would send too much.
    """
    n, total, form = transport.comm.world_size, sum(state.held), transport.wire.indices
    if n == 1 or len(state.held) != n or not total or not isinstance(form, Int32):
        return None
    state.room = min(max(LEAST, LESS * state.room), MOST)
    capacity = capacity_for(max(state.held) * k / total, state.room)
    return capacity if fits(capacity, k, n) else None


def capacity_for(most: float, room: float = LEAST) -> int:
    """Return the sums in a row where a region is expected to give so many of the largest: an even number."""
    return 2 * math.ceil(((1 + room) * most + ROOTS * math.sqrt(most)) / 2)


def fits(capacity: int, k: float, world_size: int) -> bool:
    """Return whether rows of this capacity keep what is sent below 6k (n-1)/n words, of which regions get a third."""
    return capacity * world_size <= FULLEST * k


def row_bytes(capacity: int, value_bytes: int) -> int:
    """Return the bytes of a row."""
    return 4 * HEAD + (4 + value_bytes) * capacity


@dataclass(frozen=True, slots=True)
class Found:
    """The k largest sums; all of it the same on all ranks.

    Attributes:
        smallest: magnitude among them; None where there is no sum.
        held: how many of them each region gave.
    """

    sums: SparseValues
    header: Header
    smallest: float | None
    held: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """The largest of several lists that lie one after the other.

    Attributes:
        places: where they are, ascending.
        smallest: of them; None where there are none.
        counts: how many are of each list.
    """

    places: Tensor
    smallest: float | None
    counts: tuple[int, ...]


def gather_largest(sums: Padded, k: int, capacity: int, now: RegionStep) -> Found | None:
    """Return the k largest sums of all regions, ties to the lowest index.

    None, on all ranks alike, where a region may have more of them than its row has room for: all of those that it sent
    belong to them, and it holds others.

    Args:
        sums: of this rank's region, ascending.
        capacity: of a row; the same on all ranks.
    """
    comm = now.transport.comm
    rows = comm.gather_rows(_row(sums, capacity, now), "values")
    comm.traffic.move((comm.world_size - 1) * 4 * HEAD, "values", "counts")
    comm.traffic.move((comm.world_size - 1) * 4 * capacity, "values", "indices")
    dtype = sums.entries.values.dtype
    return comm.alike(lambda: _largest_of(rows, k, capacity, dtype))


def _largest_of(rows: Tensor, k: int, capacity: int, dtype: torch.dtype) -> Found | None:
    """Return the k largest sums of all ``rows`` (n, length); see `gather_largest`."""
    if rows.device.type != "cpu":
        return _largest_in_place(rows, k, capacity, dtype)
    heads = rows[:, :HEAD].tolist()
    sizes = [min(head[2], capacity) for head in heads]
    indices = _joined(rows[:, HEAD : HEAD + capacity], sizes)
    values = _joined(rows[:, HEAD + capacity :].view(dtype), sizes)
    kept = kept_of(values.abs(), min(k, sum(sizes)), sizes)
    return _found(heads, sizes, kept, SparseValues(indices, values))


def _largest_in_place(rows: Tensor, k: int, capacity: int, dtype: torch.dtype) -> Found | None:
    """Do what `_largest_of` does by one read, where there are k: what fills a row up is smaller than any sum."""
    n = rows.shape[0]
    sizes = rows[:, 2:3].clamp_max(capacity)
    is_there = (torch.arange(capacity, device=rows.device) < sizes).view(-1)
    indices = rows[:, HEAD : HEAD + capacity].reshape(-1)
    values = rows[:, HEAD + capacity :].view(dtype).reshape(-1)
    magnitudes = values.abs().where(is_there, -1.0)
    places = torch.argsort(magnitudes, descending=True, stable=True)[:k].sort().values
    smallest = magnitudes.index_select(0, places).amin().double().view(1)
    spots = torch.searchsorted(places, torch.arange(n + 1, device=rows.device) * capacity)
    numbers = torch.cat([rows[:, :HEAD].reshape(-1).double(), smallest, spots.double()])
    known = numbers.tolist()  # host sync: list lengths
    heads = [[int(number) for number in known[HEAD * rank : HEAD * (rank + 1)]] for rank in range(n)]
    lengths = [min(head[2], capacity) for head in heads]
    if sum(lengths) >= k:
        kept = Kept(places, known[HEAD * n], tuple(int(b - a) for a, b in pairwise(known[HEAD * n + 1 :])))
        return _found(heads, lengths, kept, SparseValues(indices, values))
    there = SparseValues(indices, values).where(is_there)  # all of it
    return _found(heads, lengths, kept_of(there.values.abs(), sum(lengths), lengths), there)


def _found(heads: list[list[int]], sizes: list[int], kept: Kept, entries: SparseValues) -> Found | None:
    """Return what is kept of ``entries``, or None where a row may have been too short."""
    there = [head[2] for head in heads]
    if any(count == size < number for count, size, number in zip(kept.counts, sizes, there, strict=True)):
        return None
    header = Header(tuple(head[0] for head in heads), all(head[1] for head in heads), [])
    largest = SparseValues(entries.indices.index_select(0, kept.places), entries.values.index_select(0, kept.places))
    return Found(largest, header, kept.smallest, kept.counts)


def _row(sums: Padded, capacity: int, now: RegionStep) -> Tensor:
    """Return the head, indices and values of the largest of ``sums``, filled up with zeros: int32."""
    entries, words = sums.entries, sums.entries.values.element_size() // 4
    if entries.indices.numel() > capacity:
        largest = (kernels if entries.values.device.type == "cpu" else reference).largest(entries.values, capacity)
        entries = SparseValues(entries.indices.index_select(0, largest), entries.values.index_select(0, largest))
    row, number = entries.indices.new_zeros(HEAD + capacity * (1 + words)), entries.indices.numel()
    count = on_device([now.mine.indices.numel()], torch.int32, row.device)
    row[: HEAD - 1] = torch.cat([count, flag_of(now.is_finite, torch.int32, row.device), sums.message])
    row[HEAD : HEAD + number] = entries.indices
    row[HEAD + capacity :].view(entries.values.dtype)[:number] = entries.values
    return row


def _joined(table: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the first ``sizes[r]`` of each row of ``table`` (n, capacity), one after the other."""
    if min(sizes) == table.shape[1]:
        return table.reshape(-1)
    return torch.cat([row[:size] for row, size in zip(table, sizes, strict=True)])


def kept_of(magnitudes: Tensor, k: int, sizes: Sequence[int]) -> Kept:
    """Return the k largest of ``magnitudes`` (sum(sizes),), ties to the first."""
    if not k:
        return Kept(magnitudes.new_empty(0, dtype=torch.int32), None, (0,) * len(sizes))
    places = kernels.largest(magnitudes, k)
    smallest = magnitudes.index_select(0, places).min().double().view(1)
    ends = on_device([0, *accumulate(sizes)], torch.int32, places.device)
    numbers = torch.cat([smallest, torch.searchsorted(places, ends).double()])
    threshold, *spots = numbers.tolist()  # host sync: list lengths
    return Kept(places, threshold, tuple(int(stop - start) for start, stop in pairwise(spots)))
