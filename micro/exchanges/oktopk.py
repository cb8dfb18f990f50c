"""Ok-Topk: every rank adds up one region of the vector, and the k largest sums go to all."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.comm import Comm
from micro.exchanges.base import Exchange, Transport
from micro.exchanges.gathering import gather_header, gather_indices, header_call
from micro.exchanges.largest_sums import (
    Largest,
    OktopkState,
    capacity_after,
    capacity_for,
    fits,
    gather_largest,
    kept_of,
    row_bytes,
)
from micro.exchanges.regions import add_up, add_up_calls, spread
from micro.exchanges.traffic import Choice
from micro.index_codecs import Int32
from micro.on_device import on_device
from micro.partition import equal_slice
from micro.requests import AllGatherLists, AllReduce, Once, Reduction
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, Step
from micro.traffic import Calls

NUM_SUM_BINS = 32  # counts of sums by magnitude that each rank sends to the others: 128 bytes
FINEST = 1.01  # width of the two bins around the threshold; the others widen towards both ends, a factor 9.4 away
NEAR_SHARE = 0.25  # sums in the bin of the k-th, to those chosen: 0.1 to 0.5 on independent normal gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Oktopk(Exchange[OktopkState]):
    """Add up in regions, one for each rank, and share the k largest sums: 6k (n-1)/n words at most, usually 4k (n-1)/n.

    Every rank sends each entry it chose to the rank in whose region it lies. That rank adds them up. Regions follow the
    quantiles of what the ranks choose, so each holds about as many entries as any other. The update is exactly
    min(k, U) sums at every step, where U indices were chosen by any rank: the largest, ties to the lowest index. What a
    rank sent leaves its residual only where it is part of the update, so that mass is conserved.

    A settled step takes three collectives: the sizes of what goes to each region, that, and one all-gather of rows of
    equal length, which hold each region's largest sums, with room for the most that a region gave in the last step and
    a tenth more (`largest_sums`). Where a row was too small, and where little is known of the regions or they give very
    unequal parts, a histogram shows all ranks in which bin the k-th sum lies; they gather that bin's sums and then the
    k largest. If one region holds far too many of these, they are spread before all gather them. Packed indices travel
    that way too.

    Bytes sent per rank, n ranks, k_r entries chosen, values of w bytes: at most (4 + w) k_r to the regions, and rows of
    16 + (4 + w) c to all, c at most 1.75 k / n. By the histogram, with m_r of the k largest sums in the own region,
    (4 + w) (n-1) m_r to all, and up to (4 + w) m_r where they are spread. Beside the volume, as counts: 4 (n-1) for the
    sizes and, at a repartition, 16 (n-1)^2 / n; 136 (n-1) for a histogram and w (n-1) for each sum near the threshold.

    Args:
        repartition: tau, steps from one repartition to the next.
        balance: spread the chosen sums when one region holds more than ``balance`` times the mean; None never does.

    Source: Li and Hoefler, PPoPP 2022, arXiv 2201.07598, algorithms 1 and 2, and its public code. Differences: exact at
    every step; rotation of destinations and bucketing of messages are left to the collective (one
    uneven all-to-all); the accumulator is without the learning rate (as in the code, not in the paper); boundaries are
    added up as int64 (the code: int32, which overflows); int32 indices (the code for VGG-16: float32, wrong from 2^24
    on); an empty selection proposes equal regions, and a single rank is a group (the code fails at both).
    `PublishedOktopk` follows the public code.

    Raises:
        ValueError: ``repartition`` or ``balance`` less than 1.
    """

    repartition: int = 64
    balance: float | None = 4.0
    name: ClassVar[str] = "oktopk"
    rule: ClassVar[str] = "repaired"
    accepts: ClassVar[frozenset[Overlap]] = frozenset({Overlap.ANY, Overlap.DISJOINT})
    encodes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.repartition < 1:
            raise ValueError(f"repartition of {self.name} must be at least 1, got {self.repartition}")
        if self.balance is not None and not self.balance >= 1:
            raise ValueError(f"balance of {self.name} must be at least 1, or null for never, got {self.balance}")

    def start(self) -> OktopkState:
        """Return the state before the first step."""
        return OktopkState()

    def load(self, saved: dict[str, Any]) -> OktopkState:
        """Return the state that ``save`` described."""
        lists = {name: tuple(saved.get(name, ())) for name in ("boundaries", "held")}
        return OktopkState(**saved | lists)

    def exchange(
        self, state: OktopkState, acc: Tensor, selection: Selection, transport: Transport
    ) -> Reduction[Exchanged]:
        """Return the mean of all ranks at the largest sums of what they chose."""
        if self.moves(state, transport.step):
            state.boundaries = yield from self._boundaries(selection.indices, acc.numel(), transport.comm)
            state.held = ()
        mine = SparseValues(selection.indices, acc.index_select(0, selection.indices))
        _, sums = yield from add_up(mine, tuple(pairwise(state.boundaries)), transport)
        largest = yield from self.largest_sums(state, sums, mine, transport)
        total = largest.sums
        return Exchanged(
            update=(SparseValues(total.indices, total.values / transport.comm.world_size),),
            sent=SparseValues(*kernels.common(mine.indices, mine.values, total.indices)),
            counts=largest.header.counts,
            num_updated=total.indices.numel(),
            is_finite=largest.header.is_finite,
            overfull=largest.overfull,
        )

    def moves(self, state: OktopkState, step: Step) -> bool:
        """Return whether regions are found again in this step."""
        return not state.boundaries or step.index % self.repartition == 0

    def _boundaries(self, indices: Tensor, numel: int, comm: Comm) -> Reduction[tuple[int, ...]]:
        """Return regions whose inner boundaries are the mean over ranks of the quantiles of what each chose.

        Args:
            indices: (k_r,) what this rank chose; an empty choice proposes equal regions.
        """
        n = comm.world_size
        if indices.numel():
            places = self.quantiles(indices.numel(), n).to(indices.device)
            proposed = indices.index_select(0, places).to(torch.int64)
        else:
            starts = [equal_slice(numel, n, part)[0] for part in range(1, n)]
            proposed = torch.tensor(starts, dtype=torch.int64, device=indices.device)
        mean = (yield AllReduce(mine=proposed, kind="counts")) // n
        return (0, *mean.tolist(), numel)  # host sync: once in tau steps

    def gather(
        self, state: OktopkState, mine: SparseValues, held: list[int], transport: Transport
    ) -> Reduction[SparseValues]:
        """Return all regions' chosen sums, ascending; spread over the ranks before where one holds far too many.

        Args:
            mine: the chosen sums of this rank's region.
            held: how many each rank holds.
        """
        spans, numel, n = tuple(pairwise(state.boundaries)), state.boundaries[-1], transport.comm.world_size
        if self.balance is not None and max(held) * n > self.balance * sum(held):
            mine, held = yield from spread(mine, held, spans, transport)
            spans = ((0, numel),) * n
        chosen = Selection(mine.indices, spans=spans)
        indices = yield from gather_indices(chosen, tuple(held), numel, transport)
        return SparseValues(indices, (yield AllGatherLists(mine=mine.values, counts=held, kind="values")))

    def quantiles(self, count: int, world_size: int) -> Tensor:
        """Return places that cut the choice into world_size equal parts."""
        return torch.arange(1, world_size) * count // world_size

    def largest_sums(
        self, state: OktopkState, sums: SparseValues, mine: SparseValues, transport: Transport
    ) -> Reduction[Largest]:
        """Return the k largest of all regions' sums, exactly; the state keeps the smallest of them.

        Args:
            sums: of this rank's region.
            mine: what this rank chose.
        """
        k = transport.step.target_count
        capacity = capacity_after(state, k, transport)
        if capacity is None:
            return (yield from self._by_histogram(state, sums, mine, transport))
        largest = yield from gather_largest(sums, k, capacity, mine, transport)
        if largest is None:  # a row was too small
            state.room *= 2
            largest = yield from self._by_histogram(state, sums, mine, transport)
            return replace(largest, overfull=True)
        state.threshold, state.held = largest.smallest, largest.held
        return largest

    def _by_histogram(
        self, state: OktopkState, sums: SparseValues, mine: SparseValues, transport: Transport
    ) -> Reduction[Largest]:
        rank, magnitudes = transport.comm.rank, sums.values.abs()
        bins = torch.bucketize(magnitudes, _edges(state.threshold or 0.0, magnitudes), right=True)
        extra = torch.bincount(bins, minlength=NUM_SUM_BINS)
        is_finite = transport.step.is_finite
        header = yield from gather_header(mine.indices, is_finite=is_finite, extra=extra)
        histogram = header.extras
        cut, missing = yield Once(work=lambda: _cut(histogram, transport.step.target_count))
        if not missing:  # no rank chose anything, which all ranks know
            return Largest(sums, header)
        inside = torch.nonzero(bins == cut).view(-1)
        sizes = [row[cut] for row in histogram]
        near = yield AllGatherLists(mine=magnitudes.index_select(0, inside), counts=sizes, kind="counts")
        found = yield Once(work=lambda: kept_of(near, missing, sizes))
        state.threshold = found.smallest
        own = found.places[sum(found.counts[:rank]) :][: found.counts[rank]] - sum(sizes[:rank])
        keep = bins > cut
        keep[inside.index_select(0, own)] = True
        held = [sum(row[cut + 1 :]) + count for row, count in zip(histogram, found.counts, strict=True)]
        state.held = tuple(held)
        largest = yield from self.gather(state, sums.where(keep), held, transport)
        return Largest(largest, header)

    def volume(self, choice: Choice) -> tuple[Calls, float]:
        """Return entries to their regions, then rows, or by a histogram what is near the k-th sum; see Exchange."""
        to_regions, total = add_up_calls(choice, choice.chosen), choice.kept
        held, width = total / choice.world_size, choice.dtype.itemsize
        capacity = capacity_for(held + math.sqrt(held))  # regions follow what is chosen: the most is near the mean
        if isinstance(choice.wire.indices, Int32) and fits(capacity, total, choice.world_size):
            return (*to_regions, ("gather_rows", row_bytes(capacity, width))), total
        histogram: Calls = header_call(NUM_SUM_BINS), ("gather_lists", NEAR_SHARE * held * width)
        return (*to_regions, *histogram, *self._gather_calls(choice)), total

    def _gather_calls(self, choice: Choice) -> Calls:
        """Return what ``gather`` calls."""
        held = choice.kept / choice.world_size
        indices = choice.indices(held, choice.numel / choice.world_size)
        return ("gather_lists", indices), ("gather_lists", choice.values(held))


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
