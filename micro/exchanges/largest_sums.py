"""The k largest sums of all regions, exactly: in one all-gather of rows where that may well suffice, or by a histogram.

In a row each rank sends its largest sums, as many as what regions gave in the last step makes likely to be enough.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from micro import kernels
from micro.codecs.indices import Int32
from micro.comm.requests import AllGather, AllGatherLists, Once, Reduction
from micro.exchanges.base import Header, Transport, count_of, gather_header
from micro.exchanges.regions import gather_sums
from micro.values.finite import flag_of
from micro.values.on_device import on_device
from micro.values.sparse import SparseValues

HEAD = 4  # numbers ahead: the choice's count, the finite flag, the region's sums, none; even: values are aligned
ROOTS = 1.5  # of the most that a region gave, of room beyond it: a count x differs by chance by about sqrt(2 x)
FULLEST = 1.75  # times what a region gives in the mean
NUM_SUM_BINS = 32  # counts of sums by magnitude that each rank sends to the others: 128 bytes
FINEST = 1.01  # width of the two bins around the threshold; the others widen towards both ends, a factor 9.4 away
LEAST, MOST, LESS = 0.1, 1.6, 0.97  # share of room beyond that; doubled by a row that was too small, then falling


@dataclass(slots=True)
class OktopkState:
    """What all ranks know before a step.

    Attributes:
        boundaries: where regions begin and end, world_size + 1 of them, ascending; empty before the first step.
        threshold: the global threshold, on the magnitude of sums over ranks; None where it must be searched.
        held: how many of the largest sums each region gave in the last step; empty where boundaries have moved since.
        room: share by which a region may give more of them than the one that gave most in the last step.
    """

    boundaries: tuple[int, ...] = ()
    threshold: float | None = None
    held: tuple[int, ...] = ()
    room: float = 0.0


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest sums of all regions, the same on all ranks.

    Attributes:
        sums: ascending by index.
        header: of the step.
        smallest: magnitude among them; None where there is no sum.
        held: how many of them each region gave.
        overfull: see Exchanged.
    """

    sums: SparseValues
    header: Header
    smallest: float | None = None
    held: tuple[int, ...] = ()
    overfull: bool = False


def largest_sums(
    state: OktopkState, sums: SparseValues, balance: float | None, mine: SparseValues, transport: Transport
) -> Reduction[Largest]:
    """Return the k largest sums of all regions, ties to the lowest index; the state keeps the smallest of them.

    Args:
        sums: of this rank's region, ascending.
        balance: see `gather_sums`.
        mine: what this rank chose.
    """
    k, n, total, largest = transport.step.target_count, transport.comm.world_size, sum(state.held), None
    has_row = False
    if n > 1 and len(state.held) == n and total and isinstance(transport.wire.indices, Int32):
        state.room = min(max(LEAST, LESS * state.room), MOST)
        capacity = capacity_for(max(state.held) * k / total, state.room)
        has_row = fits(capacity, k, n)
    if has_row:
        largest = yield from _gather_rows(sums, k, capacity, mine, transport)
        if largest is None:  # a row was too small
            state.room *= 2
    if largest is None:
        largest = yield from _by_histogram(state, sums, balance, mine, transport)
        largest = replace(largest, overfull=has_row)
    if largest.held:
        state.threshold, state.held = largest.smallest, largest.held
    return largest


def capacity_for(most: float, room: float = LEAST) -> int:
    """Return the sums in a row where a region is expected to give so many of the largest: an even number."""
    return 2 * math.ceil(((1 + room) * most + ROOTS * math.sqrt(most)) / 2)


def fits(capacity: int, k: float, world_size: int) -> bool:
    """Return whether rows of this capacity keep what is sent below 6k (n-1)/n words, of which regions get a third."""
    return capacity * world_size <= FULLEST * k


def _gather_rows(
    sums: SparseValues, k: int, capacity: int, mine: SparseValues, transport: Transport
) -> Reduction[Largest | None]:
    """Return the k largest sums of all regions, of each of which a row has room for ``capacity``.

    None, on all ranks, where a region may have more of them: all that it sent belong to them, and it holds others.
    """
    dtype = sums.values.dtype
    entries = sums.at(kernels.largest(sums.values, capacity)) if sums.indices.numel() > capacity else sums
    number = entries.indices.numel()
    row = entries.indices.new_zeros(HEAD + capacity * (1 + dtype.itemsize // 4))
    flag = flag_of(transport.step.is_finite, torch.int32, row.device)
    row[: HEAD - 1] = torch.cat([count_of(mine.indices), flag, count_of(sums.indices)])
    row[HEAD : HEAD + number] = entries.indices
    row[HEAD + capacity :].view(dtype)[:number] = entries.values
    rows = yield AllGather(mine=row, kind="values", bytes_by_kind={"counts": 4 * HEAD, "indices": 4 * capacity})
    largest: Largest | None = yield Once(work=lambda: _largest_of(rows, k, capacity, dtype))
    return largest


def _largest_of(rows: Tensor, k: int, capacity: int, dtype: torch.dtype) -> Largest | None:
    """Return the k largest sums of all ``rows`` (n, length); see `_gather_rows`."""
    chosen, finite, there, _ = zip(*rows[:, :HEAD].tolist(), strict=True)  # host sync: list lengths
    sizes = [min(count, capacity) for count in there]
    tables = rows[:, HEAD : HEAD + capacity], rows[:, HEAD + capacity :].view(dtype)
    indices, values = (torch.cat([row[:size] for row, size in zip(table, sizes, strict=True)]) for table in tables)
    places, smallest, held = _largest_places(values.abs(), min(k, sum(sizes)), sizes)
    if any(count == size < number for count, size, number in zip(held, sizes, there, strict=True)):
        return None
    return Largest(SparseValues(indices, values).at(places), Header(chosen, all(finite), []), smallest, held)


def _largest_places(magnitudes: Tensor, k: int, sizes: Sequence[int]) -> tuple[Tensor, float | None, tuple[int, ...]]:
    """Return where the k largest of several lists are, ascending, ties to the first; the smallest; how many of each.

    Args:
        magnitudes: (sum(sizes),) list after list.
    """
    if not k:
        return magnitudes.new_empty(0, dtype=torch.int32), None, (0,) * len(sizes)
    places = kernels.largest(magnitudes, k)
    smallest = magnitudes.index_select(0, places).min().double().view(1)
    ends = on_device([0, *accumulate(sizes)], torch.int32, places.device)
    numbers = torch.cat([smallest, torch.searchsorted(places, ends).double()])
    threshold, *spots = numbers.tolist()  # host sync: list lengths
    return places, threshold, tuple(int(stop - start) for start, stop in pairwise(spots))


def _by_histogram(
    state: OktopkState, sums: SparseValues, balance: float | None, mine: SparseValues, transport: Transport
) -> Reduction[Largest]:
    """Return the k largest sums of all regions: those above a bin of magnitudes, and the largest inside it.

    A histogram shows all ranks in which bin the k-th sum lies; they gather that bin's sums, then what is kept.
    """
    rank, magnitudes = transport.comm.rank, sums.values.abs()
    bins = torch.bucketize(magnitudes, _edges(state.threshold or 0.0, magnitudes), right=True)
    extra = torch.bincount(bins, minlength=NUM_SUM_BINS)
    header = yield from gather_header(mine.indices, is_finite=transport.step.is_finite, extra=extra)
    histogram = header.extras
    cut, missing = yield Once(work=lambda: _cut(histogram, transport.step.target_count))
    if not missing:  # no rank chose anything, which all ranks know
        return Largest(sums, header)
    inside = torch.nonzero(bins == cut).view(-1)
    sizes = [row[cut] for row in histogram]
    near = yield AllGatherLists(mine=magnitudes.index_select(0, inside), counts=sizes, kind="counts")
    places, smallest, counts = yield Once(work=lambda: _largest_places(near, missing, sizes))
    own = places[sum(counts[:rank]) :][: counts[rank]] - sum(sizes[:rank])
    keep = bins > cut
    keep[inside.index_select(0, own)] = True
    held = [sum(row[cut + 1 :]) + count for row, count in zip(histogram, counts, strict=True)]
    largest = yield from gather_sums(sums.where(keep), held, state.boundaries, balance, transport)
    return Largest(largest, header, smallest, tuple(held))


def _edges(threshold: float, like: Tensor) -> Tensor:
    """Return NUM_SUM_BINS - 1 ascending magnitudes, fine around the threshold and coarse away from it."""
    half = NUM_SUM_BINS // 2
    powers = [place * abs(place) for place in range(1 - half, half)]
    return on_device([threshold * FINEST**power for power in powers], like.dtype, like.device)


def _cut(histogram: list[list[int]], k: int) -> tuple[int, int]:
    """Return the bin in which the k-th largest lies (the smallest of all if there are fewer), and how many it gives."""
    totals = [sum(column) for column in zip(*histogram, strict=True)]
    wanted, cut = min(k, sum(totals)), len(totals) - 1
    while wanted > totals[cut]:
        wanted -= totals[cut]
        cut -= 1
    return cut, wanted
