"""Find the exact k largest sums of all regions for Ok-Topk, with one all-gather of rows or, failing that, a histogram.

A row holds a rank's largest sums: a number of them that should suffice, judging by the last step.
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
from micro.exchanges.base import Transport, count_of
from micro.exchanges.header import Header, gather_header
from micro.exchanges.regions import gather_sums
from micro.values.finite import flag_of, on_device
from micro.values.sparse import SparseValues

HEAD = 4  # numbers ahead of a row: count, finite flag, number of sums, unused; an even number aligns the values
ROOTS = 1.5  # margin in square roots of the largest count: a count x changes by about sqrt(2 x) by chance
FULLEST = 1.75  # largest capacity of a row, in means over regions
NUM_SUM_BINS = 32  # bins of the histogram of magnitudes that each rank sends: 128 bytes
FINEST = 1.01  # width of the two bins around the threshold; the others widen towards both ends, a factor 9.4 away
MIN_SLACK, MAX_SLACK = 0.1, 1.6  # limits of the relative margin; a row that was too small doubles it
SLACK_DECAY = 0.97  # per step


@dataclass(slots=True)
class OktopkState:
    """What all ranks know before a step.

    Attributes:
        boundaries: where regions begin and end, world_size + 1 of them, ascending; empty before the first step.
        threshold: the global threshold on the magnitude of sums over ranks; None if it must be searched.
        held: how many of the largest sums each region held in the last step; empty if boundaries moved since.
        room: relative margin of a row above the largest of these counts.
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
        smallest: the smallest magnitude among them; None if there is no sum.
        held: how many of them each region held.
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
    """Return the k largest sums of all regions, ties to the lowest index; the smallest becomes the threshold.

    Args:
        sums: of this rank's region, ascending.
        balance: see `gather_sums`.
        mine: what this rank chose.
    """
    k, n, total, largest = transport.step.target_count, transport.comm.world_size, sum(state.held), None
    has_row = False
    if n > 1 and len(state.held) == n and total and isinstance(transport.wire.indices, Int32):
        state.room = min(max(MIN_SLACK, SLACK_DECAY * state.room), MAX_SLACK)
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


def capacity_for(most: float, room: float = MIN_SLACK) -> int:
    """Return the number of sums in a row, an even number, if a region is expected to hold ``most`` of the largest."""
    return 2 * math.ceil(((1 + room) * most + ROOTS * math.sqrt(most)) / 2)


def fits(capacity: int, k: float, world_size: int) -> bool:
    """Return whether rows of this capacity keep the traffic below 6k (n-1)/n words, a third of it sent to regions."""
    return capacity * world_size <= FULLEST * k


def _gather_rows(
    sums: SparseValues, k: int, capacity: int, mine: SparseValues, transport: Transport
) -> Reduction[Largest | None]:
    """Return the k largest sums of all regions by an all-gather of rows with ``capacity`` sums each.

    None, on all ranks, if a region may hold more of them: all sums in its row are among the k largest, and it has more.
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
    """Return the ascending positions of the k largest of several lists (ties: first), the smallest, and counts.

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
    """Return the k largest sums of all regions: those above a bin of magnitudes, and the largest in that bin.

    A histogram tells all ranks which bin contains the k-th sum. They gather that bin's sums, then the k largest.
    """
    rank, magnitudes = transport.comm.rank, sums.values.abs()
    bins = torch.bucketize(magnitudes, _edges(state.threshold or 0.0, magnitudes), right=True)
    extra = torch.bincount(bins, minlength=NUM_SUM_BINS)
    header = yield from gather_header(mine.indices, is_finite=transport.step.is_finite, extra=extra)
    histogram = header.extras
    cut, missing = yield Once(work=lambda: _bin_of_kth(histogram, transport.step.target_count))
    if not missing:  # no rank chose anything, as all ranks know
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
    """Return NUM_SUM_BINS - 1 ascending edges, dense around the threshold and sparse away from it."""
    half = NUM_SUM_BINS // 2
    powers = [place * abs(place) for place in range(1 - half, half)]
    return on_device([threshold * FINEST**power for power in powers], like.dtype, like.device)


def _bin_of_kth(histogram: list[list[int]], k: int) -> tuple[int, int]:
    """Return the bin of the k-th largest (of the smallest, if there are fewer), and how many to take from it."""
    totals = [sum(column) for column in zip(*histogram, strict=True)]
    wanted, cut = min(k, sum(totals)), len(totals) - 1
    while wanted > totals[cut]:
        wanted -= totals[cut]
        cut -= 1
    return cut, wanted
