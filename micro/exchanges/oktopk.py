"""Ok-Topk: every rank adds up one region of the vector, and the k largest sums go to all."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.exchanges.moving_regions import Largest, MovingRegions, OktopkState, RegionStep
from micro.exchanges.sums_in_rows import capacity_after, gather_largest, kept_of
from micro.on_device import on_device
from micro.requests import AllGatherLists, Once, Reduction
from micro.sparse import SparseValues

NUM_SUM_BINS = 32  # counts of sums by magnitude that each rank sends to the others: 128 bytes
FINEST = 1.01  # width of the two bins around the threshold; the others widen towards both ends, a factor 9.4 away


@dataclass(frozen=True, slots=True, kw_only=True)
class Oktopk(MovingRegions):
    """Add up in regions, one for each rank, and share the k largest sums: 6k (n-1)/n words at most, usually 4k (n-1)/n.

    Regions follow what the ranks choose (`MovingRegions`). The update is exactly min(k, U) sums at every step, where U
    indices were chosen by any rank: the largest, ties to the lowest index.

    A settled step takes three collectives: the sizes of what goes to each region, that, and one all-gather of rows of
    equal length, which hold each region's largest sums, with room for the most that a region gave in the last step and
    a tenth more (`sums_in_rows`). Where a row was too small, and where little is known of the regions or they give very
    unequal parts, a histogram shows all ranks in which bin the k-th sum lies; they gather that bin's sums and then the
    k largest. If one region holds far too many of these, they are spread before all gather them. Packed indices travel
    that way too.

    Bytes sent per rank, n ranks, k_r entries chosen, values of w bytes: at most (4 + w) k_r to the regions, and rows of
    16 + (4 + w) c to all, c at most 1.75 k / n. By the histogram, with m_r of the k largest sums in the own region,
    (4 + w) (n-1) m_r to all, and up to (4 + w) m_r where they are spread. Beside the volume, as counts: 4 (n-1) for the
    sizes and, at a repartition, 16 (n-1)^2 / n; 136 (n-1) for a histogram and w (n-1) for each sum near the threshold.

    Args:
        repartition, balance: see `MovingRegions`.

    Source: Li and Hoefler, PPoPP 2022, arXiv 2201.07598, algorithms 1 and 2, and its public code. Differences: exact at
    every step; rotation of destinations and bucketing of messages are left to the collective (one
    uneven all-to-all); the accumulator is without the learning rate (as in the code, not in the paper); boundaries are
    added up as int64 (the code: int32, which overflows); int32 indices (the code for VGG-16: float32, wrong from 2^24
    on); an empty selection proposes equal regions, and a single rank is a group (the code fails at both).
    `PublishedOktopk` follows the public code.

    Raises:
        ValueError: ``repartition`` or ``balance`` less than 1.
    """

    name: ClassVar[str] = "oktopk"
    rule: ClassVar[str] = "repaired"

    def quantiles(self, count: int, world_size: int) -> Tensor:
        """Return places that cut the choice into world_size equal parts."""
        return torch.arange(1, world_size) * count // world_size

    def largest_sums(self, state: OktopkState, sums: SparseValues, now: RegionStep) -> Reduction[Largest]:
        """Return the k largest of all regions' sums, exactly; the state keeps the smallest of them."""
        k = now.step.target_count
        capacity = capacity_after(state, k, now.transport)
        if capacity is None:
            return (yield from self._by_histogram(state, sums, now))
        found = yield from gather_largest(sums, k, capacity, now)
        if found is None:  # a row was too small
            state.room *= 2
            return (yield from self._by_histogram(state, sums, now, overfull=True))
        state.threshold, state.held = found.smallest, found.held
        return Largest(found.sums, found.header)

    def _by_histogram(
        self, state: OktopkState, sums: SparseValues, now: RegionStep, *, overfull: bool = False
    ) -> Reduction[Largest]:
        comm, magnitudes = now.transport.comm, sums.values.abs()
        bins = torch.bucketize(magnitudes, _edges(state.threshold or 0.0, magnitudes), right=True)
        header = yield from now.gather_header(torch.bincount(bins, minlength=NUM_SUM_BINS))
        histogram = header.extras
        cut, missing = yield Once(work=lambda: _cut(histogram, now.step.target_count))
        if not missing:  # no rank chose anything, which all ranks know
            return Largest(sums, header, overfull)
        inside = torch.nonzero(bins == cut).view(-1)
        sizes = [row[cut] for row in histogram]
        near = yield AllGatherLists(mine=magnitudes.index_select(0, inside), counts=sizes, kind="counts")
        found = yield Once(work=lambda: kept_of(near, missing, sizes))
        state.threshold = found.smallest
        own = found.places[sum(found.counts[: comm.rank]) :][: found.counts[comm.rank]] - sum(sizes[: comm.rank])
        keep = bins > cut
        keep[inside.index_select(0, own)] = True
        held = [sum(row[cut + 1 :]) + count for row, count in zip(histogram, found.counts, strict=True)]
        state.held = tuple(held)
        largest = yield from self.gather(state, sums.where(keep), held, now.transport)
        return Largest(largest, header, overfull)


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
