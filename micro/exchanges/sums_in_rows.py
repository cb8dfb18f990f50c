"""The k largest sums of all regions in one all-gather: each rank sends its largest, as many as may well suffice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from micro import kernels
from micro.comm import Comm
from micro.exchanges.base import Header, count_of
from micro.exchanges.moving_regions import OktopkState, RegionStep
from micro.exchanges.regions import Transport
from micro.health import Finite, flag_of
from micro.index_codecs import Int32
from micro.kernels import reference
from micro.on_device import on_device
from micro.sparse import Padded, SparseValues

HEAD = 4  # numbers ahead: the choice's count, the finite flag, the region's sums, a status; even: values are aligned
ROOTS = 1.5  # of the most that a region gave, of room beyond it: a count x differs by chance by about sqrt(2 x)
FULLEST = 1.75  # times what a region gives in the mean
LEAST, MOST, LESS = 0.1, 1.6, 0.97  # share of room beyond that; doubled by a row that was too small, then falling


def capacity_after(state: OktopkState, k: int, transport: Transport) -> int | None:
    """Return how many sums a row has room for, from what each region gave in the last step: an even number.

    None, on all ranks alike, where nothing is known of it, where indices are packed, or where rows would send too much.
    The state's room falls.
    """
    if not _is_known(state, transport):
        return None
    capacity = next_capacity(state, k, transport)
    state.room = _next_room(state)
    return capacity


def next_capacity(state: OktopkState, k: int, transport: Transport) -> int | None:
    """Return what `capacity_after` does, and change nothing."""
    if not _is_known(state, transport):
        return None
    capacity = capacity_for(max(state.held) * k / sum(state.held), _next_room(state))
    return capacity if fits(capacity, k, transport.comm.world_size) else None


def _is_known(state: OktopkState, transport: Transport) -> bool:
    n = transport.comm.world_size
    return n > 1 and len(state.held) == n and sum(state.held) > 0 and isinstance(transport.wire.indices, Int32)


def _next_room(state: OktopkState) -> float:
    return min(max(LEAST, LESS * state.room), MOST)


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
    row = _row(sums, capacity, count_of(now.mine), now.is_finite)
    rows = _gathered(row, capacity, now.transport.comm)
    dtype = sums.entries.values.dtype
    return now.transport.comm.alike(lambda: _largest_of(rows, k, capacity, dtype))


def _gathered(row: Tensor, capacity: int, comm: Comm) -> Tensor:
    """Return the rows of all ranks, (n, length)."""
    rows = comm.gather_rows(row, "values")
    comm.traffic.move((comm.world_size - 1) * 4 * HEAD, "values", "counts")
    comm.traffic.move((comm.world_size - 1) * 4 * capacity, "values", "indices")
    return rows


@dataclass(frozen=True, slots=True)
class Told:
    """What a host has read of the rows of all ranks, and of its own numbers.

    Attributes:
        statuses: of the ranks; see `gather_largest_unread`.
        num_sums: in this rank's region.
        found: what `gather_largest` returns, where all statuses are 0.
        own: the rank's numbers.
    """

    statuses: tuple[int, ...]
    num_sums: int
    found: Found | None
    own: list[float]


def gather_largest_unread(
    sums: Padded, k: int, capacity: int, now: RegionStep, *, count: Tensor, status: Tensor, own: Tensor
) -> Told:
    """Do what `gather_largest` does on an accelerator, and read more numbers by the same read.

    Args:
        count: (1,) int32, how many indices this rank chose.
        status: (1,) int32, 0 where nothing stands against the sums; sent to all ranks.
        own: (m,) float64 of this rank.
    """
    comm, dtype = now.transport.comm, sums.entries.values.dtype
    rows = _gathered(_row(sums, capacity, count, now.is_finite, status), capacity, comm)
    ranked = comm.alike(lambda: _ranked(rows, k, capacity, dtype))
    numbers_read = torch.cat([ranked.numbers, own]).tolist()  # host sync: list lengths, and what the choice learns
    known, mine = numbers_read[: ranked.numbers.numel()], numbers_read[ranked.numbers.numel() :]
    heads = _heads(known, comm.world_size)
    statuses = tuple(head[3] for head in heads)
    found = None if any(statuses) else comm.alike(lambda: _found_in_place(ranked, known, k, capacity))
    return Told(statuses, heads[comm.rank][2], found, mine)


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


@dataclass(frozen=True, slots=True)
class Ranked:
    """The entries of all rows, of which an accelerator has found the largest.

    Attributes:
        entries: (n * capacity,) those of all rows, with what fills these up.
        is_there: (n * capacity,) bool, which are no filling.
        places: of the k largest, ascending; fillings are smaller than any sum.
        numbers: float64: the heads, the smallest magnitude at these places, where each row begins among them.
    """

    entries: SparseValues
    is_there: Tensor
    places: Tensor
    numbers: Tensor


def _ranked(rows: Tensor, k: int, capacity: int, dtype: torch.dtype) -> Ranked:
    n = rows.shape[0]
    sizes = rows[:, 2:3].clamp_max(capacity)
    is_there = (torch.arange(capacity, device=rows.device) < sizes).view(-1)
    values = rows[:, HEAD + capacity :].view(dtype).reshape(-1)
    magnitudes = values.abs().where(is_there, -1.0)
    places = torch.argsort(magnitudes, descending=True, stable=True)[:k].sort().values
    smallest = magnitudes.index_select(0, places).amin().double().view(1)
    spots = torch.searchsorted(places, torch.arange(n + 1, device=rows.device) * capacity)
    numbers = torch.cat([rows[:, :HEAD].reshape(-1).double(), smallest, spots.double()])
    return Ranked(SparseValues(rows[:, HEAD : HEAD + capacity].reshape(-1), values), is_there, places, numbers)


def _heads(known: Sequence[float], n: int) -> list[list[int]]:
    return [[int(number) for number in known[HEAD * rank : HEAD * (rank + 1)]] for rank in range(n)]


def _largest_in_place(rows: Tensor, k: int, capacity: int, dtype: torch.dtype) -> Found | None:
    """Do what `_largest_of` does by one read, where there are k."""
    ranked = _ranked(rows, k, capacity, dtype)
    return _found_in_place(ranked, ranked.numbers.tolist(), k, capacity)  # host sync: list lengths


def _found_in_place(ranked: Ranked, known: Sequence[float], k: int, capacity: int) -> Found | None:
    """Return the k largest of what was ranked, whose numbers are ``known``; see `gather_largest`."""
    n = ranked.is_there.numel() // capacity
    heads = _heads(known, n)
    lengths = [min(head[2], capacity) for head in heads]
    if sum(lengths) >= k:
        kept = Kept(ranked.places, known[HEAD * n], tuple(int(b - a) for a, b in pairwise(known[HEAD * n + 1 :])))
        return _found(heads, lengths, kept, ranked.entries)
    there = ranked.entries.where(ranked.is_there)  # all of it
    return _found(heads, lengths, kept_of(there.values.abs(), sum(lengths), lengths), there)


def _found(heads: list[list[int]], sizes: list[int], kept: Kept, entries: SparseValues) -> Found | None:
    """Return what is kept of ``entries``, or None where a row may have been too short."""
    there = [head[2] for head in heads]
    if any(count == size < number for count, size, number in zip(kept.counts, sizes, there, strict=True)):
        return None
    header = Header(tuple(head[0] for head in heads), all(head[1] for head in heads), [])
    largest = SparseValues(entries.indices.index_select(0, kept.places), entries.values.index_select(0, kept.places))
    return Found(largest, header, kept.smallest, kept.counts)


def _row(sums: Padded, capacity: int, count: Tensor, is_finite: Finite, status: Tensor | None = None) -> Tensor:
    """Return the head, indices and values of the largest of ``sums``, filled up with zeros: int32."""
    entries, words = sums.entries, sums.entries.values.element_size() // 4
    if entries.indices.numel() > capacity:
        largest = (kernels if entries.values.device.type == "cpu" else reference).largest(entries.values, capacity)
        entries = SparseValues(entries.indices.index_select(0, largest), entries.values.index_select(0, largest))
    row, number = entries.indices.new_zeros(HEAD + capacity * (1 + words)), entries.indices.numel()
    head = [count, flag_of(is_finite, torch.int32, row.device), sums.message, *([] if status is None else [status])]
    row[: len(head)] = torch.cat(head)
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
