"""Ok-Topk: every rank adds up one region of the vector, and the k largest sums go to all."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.comm import Comm
from micro.exchanges.base import Exchange, Wire, gather_indices
from micro.index_codecs import IndexCodec
from micro.partition import equal_slice
from micro.parts import Rule, check_rule
from micro.sparse import Exchanged, Overlap, Selection, SparseValues, Step, summed

DEFAULT_PERIOD = 32  # steps, as in public code
Spans = Sequence[tuple[int, int]]

NUM_SUM_BINS = 32  # counts of sums by magnitude that each rank tells the others: 128 bytes
FINEST = 1.01  # width of the two bins around the threshold; the others widen towards both ends, a factor 9.4 away


@dataclass(slots=True)
class OktopkState:
    """What all ranks know alike before a step.

    Attributes:
        boundaries: where regions begin and end, world_size + 1 of them, ascending; empty before the first step.
        threshold: the global threshold, on the magnitude of sums over ranks; None where it must be found anew.
    """

    boundaries: tuple[int, ...] = ()
    threshold: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Oktopk(Exchange[OktopkState]):
    """Add up in regions, one for each rank, and share the k largest sums: 6k (n-1)/n words at most, usually 4k (n-1)/n.

    Every rank sends each entry it chose to the rank in whose region it lies. That rank adds them up; the k largest
    sums of all regions, divided by n, are the update. What a rank sent leaves its residual only where it is part of the
    update, so that mass is conserved. Regions follow the quantiles of what the ranks choose, so each holds about as
    many entries as any other; if one holds far too many of the k largest, these are spread before all gather them.

    Bytes sent per rank, n ranks, k_r entries chosen, values of w bytes, m_r of the k largest sums in the own region:
    at most (4 + w) k_r to the regions, (4 + w) (n-1) m_r to all, and up to (4 + w) m_r where they are spread. Beside
    the volume, as counts: 4 (n-1) for the sizes and, at a repartition, 16 (n-1)^2 / n; with 'repaired' 136 (n-1) for a
    histogram and w (n-1) for each sum near the threshold; with 'published' 12 (n-1), and (4 + w) (n-1) for every sum
    of the region at each re-evaluation.

    Args:
        rule: 'repaired', exactly min(k, U) sums at every step, where U indices were chosen by any rank: the largest,
            ties to the lowest index; 'published', the authors' public code: whatever exceeds a reused threshold, which
            a hand-tuned controller moves.
        repartition: tau, steps from one repartition to the next.
        reevaluate: tau', steps from one exact threshold of 'published' to the next; 'repaired' is exact at every step.
        balance: spread the chosen sums when one region holds more than ``balance`` times the mean; None never does.

    Source: Li and Hoefler, PPoPP 2022, arXiv 2201.07598, algorithms 1 and 2, and its public code. Differences: rotation
    of destinations and bucketing of messages are left to the collective (one uneven all-to-all); the accumulator is
    without the learning rate (as in the code, not in the paper); boundaries are added up as int64 (the code: int32,
    which overflows); int32 indices (the code for VGG-16: float32, wrong from 2^24 on); an empty selection proposes
    equal regions, and one rank alone is a group (the code fails at both). 'repaired': all ranks learn in which bin of a
    histogram the k-th sum lies, and then only that bin's sums. 'published' has the constants of the code for VGG-16,
    whose balancing is switched off (``balance=None``), without its 512 dense steps at the start; a state that is new
    between two re-evaluations, or whose re-evaluation found only zeros, re-evaluates at once. The code for LSTM and
    BERT leaves nearly all that a re-evaluation applied in the residuals as well: counted twice, and not offered here.

    Raises:
        ValueError: no such rule, a period less than 1, or ``balance`` less than 1.
    """

    rule: Rule = "repaired"
    repartition: int = 64
    reevaluate: int = DEFAULT_PERIOD
    balance: float | None = 4.0
    name: ClassVar[str] = "oktopk"
    accepts: ClassVar[frozenset[Overlap]] = frozenset({Overlap.ANY, Overlap.DISJOINT})
    encodes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_rule(self)
        for name, value in (("repartition", self.repartition), ("reevaluate", self.reevaluate)):
            if value < 1:
                raise ValueError(f"{name} of {self.name} must be at least 1, got {value}")
        if self.rule == "repaired" and self.reevaluate != DEFAULT_PERIOD:
            raise ValueError(f"reevaluate of {self.name} is for rule=published; repaired is exact at every step")
        if self.balance is not None and not self.balance >= 1:
            raise ValueError(f"balance of {self.name} must be at least 1, or null for never, got {self.balance}")

    def start(self) -> OktopkState:
        """Return the state before the first step."""
        return OktopkState()

    def load(self, saved: dict[str, Any]) -> OktopkState:
        """Return the state that ``save`` described."""
        return OktopkState(tuple(saved["boundaries"]), saved["threshold"])

    def exchange(
        self,
        state: OktopkState,
        acc: Tensor,
        selection: Selection,
        *,
        step: Step,
        overlap: Overlap,
        wire: Wire,
        comm: Comm,
        healthy: bool,
    ) -> Exchanged:
        """Return the mean of all ranks at the largest sums of what they chose."""
        if not state.boundaries or step.index % self.repartition == 0:
            apart = self.rule == "published"
            state.boundaries = _repartitioned(selection.indices, acc.numel(), comm, equal_chunks=apart)
        mine = SparseValues(selection.indices, acc.index_select(0, selection.indices))
        sums = _reduced(mine, tuple(pairwise(state.boundaries)), wire.indices, comm)
        told = _Told(mine.indices.numel(), healthy, comm)
        if self.rule == "published":
            total = self._above_reused_threshold(state, sums, step, told, wire.indices)
        else:
            total = self._k_largest(state, sums, step.target_count, told, wire.indices)
        return Exchanged(
            update=(SparseValues(total.indices, total.values / comm.world_size),),
            sent=_common(mine, total.indices),
            counts=told.counts,
            num_updated=total.indices.numel(),
            healthy=told.healthy,
        )

    def _k_largest(
        self, state: OktopkState, sums: SparseValues, k: int, told: "_Told", codec: IndexCodec
    ) -> SparseValues:
        """Return the k largest of all regions' sums, exactly, on all ranks; the state gets the smallest of them."""
        comm, magnitudes = told.comm, sums.values.abs()
        bins = torch.bucketize(magnitudes, _edges(state.threshold or 0.0, magnitudes), right=True)
        histogram = told.share(torch.bincount(bins, minlength=NUM_SUM_BINS))
        cut, missing = _cut(histogram, k)
        if not missing:  # nobody chose anything, which all ranks know
            return sums
        inside = torch.nonzero(bins == cut).view(-1)
        sizes = [row[cut] for row in histogram]
        near = torch.cat(comm.gather_lists(magnitudes.index_select(0, inside), sizes, "counts"))
        chosen = kernels.largest(near, missing)  # regions ascend with ranks, so ties go to the lowest index
        smallest = near.index_select(0, chosen).min().double().view(1)
        ends = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=near.device)
        places = torch.searchsorted(chosen, ends)
        state.threshold, *told_places = torch.cat([smallest, places.double()]).tolist()  # host sync: list lengths
        spots = [int(place) for place in told_places]
        own = chosen[spots[comm.rank] : spots[comm.rank + 1]] - ends[comm.rank]
        keep = bins > cut
        keep[inside.index_select(0, own)] = True
        held = [
            sum(row[cut + 1 :]) + stop - start for row, (start, stop) in zip(histogram, pairwise(spots), strict=True)
        ]
        return self._gathered(state, _where(sums, keep), held, codec, comm)

    def _above_reused_threshold(
        self, state: OktopkState, sums: SparseValues, step: Step, told: "_Told", codec: IndexCodec
    ) -> SparseValues:
        """Return what the public code applies, on all ranks: at a re-evaluation the k largest, else all above."""
        k, comm = step.target_count, told.comm
        if state.threshold is None or step.index % self.reevaluate == 0:
            sums = _where(sums, sums.values != 0)
            held = [row[0] for row in told.share(_count(sums))]
            indices = torch.cat(comm.gather_lists(sums.indices, held, "counts"))
            values = torch.cat(comm.gather_lists(sums.values, held, "counts"))
            chosen = kernels.largest(values, k)
            total = SparseValues(indices.index_select(0, chosen), values.index_select(0, chosen))
            state.threshold = float(total.values.abs().min()) if sum(held) else None  # host sync: once in tau' steps
            return total
        sums = _where(sums, sums.values.abs() > state.threshold)
        held = [row[0] for row in told.share(_count(sums))]
        state.threshold *= _factor(sum(held) / k)
        return self._gathered(state, sums, held, codec, comm)

    def _gathered(
        self, state: OktopkState, mine: SparseValues, held: list[int], codec: IndexCodec, comm: Comm
    ) -> SparseValues:
        """Return all regions' chosen sums, ascending; spread over the ranks before where one holds far too many.

        Args:
            held: how many each rank holds.
        """
        spans, numel = tuple(pairwise(state.boundaries)), state.boundaries[-1]
        if self.balance is not None and max(held) * comm.world_size > self.balance * sum(held):
            mine, held = _spread(mine, held, spans, codec, comm)
            spans = ((0, numel),) * comm.world_size
        found = Selection(mine.indices, spans=spans)
        indices = gather_indices(found, tuple(held), Overlap.ANY, numel, codec, comm)
        return SparseValues(torch.cat(indices), torch.cat(comm.gather_lists(mine.values, held, "values")))


class _Told:
    """What ranks tell each other once in a step: how many they chose, whether they were healthy, and a rule's row."""

    def __init__(self, count: int, healthy: bool, comm: Comm) -> None:
        self.counts: tuple[int, ...] = (count,)
        self.healthy = healthy
        self.comm = comm

    def share(self, row: Tensor) -> list[list[int]]:
        """Return every rank's ``row`` (m,) of integers, and learn the rest on the way: 4 (m + 2) (n-1) bytes."""
        head = torch.tensor([self.counts[0], int(self.healthy)], dtype=torch.int32, device=row.device)
        rows = self.comm.gather_rows(torch.cat([head, row.to(torch.int32)])).tolist()  # host sync: list lengths
        self.counts = tuple(told[0] for told in rows)
        self.healthy = all(told[1] for told in rows)
        return [told[2:] for told in rows]


def _repartitioned(indices: Tensor, numel: int, comm: Comm, *, equal_chunks: bool) -> tuple[int, ...]:
    """Return regions whose inner boundaries are the mean over ranks of the quantiles of what each chose.

    Args:
        indices: (k_r,) what this rank chose.
        equal_chunks: quantiles lie k_r // n entries apart, as the public code has them; the last region gets the rest.
    """
    n, count = comm.world_size, indices.numel()
    inner = torch.arange(1, n, device=indices.device)
    if count:
        places = inner * (count // n) if equal_chunks else inner * count // n
        proposed = indices.index_select(0, places).to(torch.int64)
    else:
        proposed = inner.new_tensor([equal_slice(numel, n, part)[0] for part in range(1, n)])
    mean = comm.all_reduce_(proposed, "counts") // n
    return (0, *mean.tolist(), numel)  # host sync: once in tau steps


def _reduced(mine: SparseValues, regions: Spans, codec: IndexCodec, comm: Comm) -> SparseValues:
    """Send every entry to the rank in whose region it lies; return the sums of the own region, added in rank order."""
    n, count, device = comm.world_size, mine.indices.numel(), mine.indices.device
    inner = torch.tensor([start for start, _ in regions[1:]], dtype=torch.int32, device=device)
    ends = torch.searchsorted(mine.indices, inner)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1), append=ends.new_full((1,), count)).to(torch.int32)
    received = comm.scatter_parts(sizes, [1] * n, "counts").view(-1)
    going, coming = torch.stack([sizes, received]).tolist()  # host sync: sizes shape the messages
    own = (regions[comm.rank],) * n
    return summed(_scattered(mine, (going, coming), (regions, own), codec, comm))


def _spread(
    mine: SparseValues, held: list[int], regions: Spans, codec: IndexCodec, comm: Comm
) -> tuple[SparseValues, list[int]]:
    """Move entries to neighbouring ranks, their order kept, until all hold as many, give or take one."""
    n, rank, total = comm.world_size, comm.rank, sum(held)
    starts = [0, *accumulate(held)]
    slices = [equal_slice(total, n, part) for part in range(n)]
    going = [_overlap((starts[rank], starts[rank + 1]), part) for part in slices]
    coming = [_overlap(have, slices[rank]) for have in pairwise(starts)]
    own = (regions[rank],) * n
    parts = _scattered(mine, (going, coming), (own, regions), codec, comm)
    moved = SparseValues(torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts]))
    return moved, [stop - start for start, stop in slices]


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def _scattered(
    mine: SparseValues, sizes: tuple[list[int], list[int]], spans: tuple[Spans, Spans], codec: IndexCodec, comm: Comm
) -> list[SparseValues]:
    """Send neighbouring pieces of a list to the ranks in turn; return what came from each.

    Args:
        sizes: how many entries go to each rank, and how many come from each.
        spans: in which range of the vector the entries for each rank lie, and those from each.
    """
    (going, coming), (there, here) = sizes, spans
    pieces = zip(mine.indices.split(going), there, strict=True)
    encoded = [codec.encode(piece - start, stop - start) for piece, (start, stop) in pieces]
    lengths = [codec.num_bytes(count, stop - start) for count, (start, stop) in zip(coming, here, strict=True)]
    blobs = comm.scatter_lists(encoded, lengths, "indices")
    values = comm.scatter_lists(mine.values.split(going), coming, "values")
    decoded = [codec.decode(blob, count, b - a) + a for blob, count, (a, b) in zip(blobs, coming, here, strict=True)]
    return [SparseValues(indices, found) for indices, found in zip(decoded, values, strict=True)]


def _edges(threshold: float, like: Tensor) -> Tensor:
    """Return NUM_SUM_BINS - 1 ascending magnitudes, fine around the threshold and coarse away from it."""
    half = NUM_SUM_BINS // 2
    powers = [place * abs(place) for place in range(1 - half, half)]
    return torch.tensor([threshold * FINEST**power for power in powers], dtype=like.dtype, device=like.device)


def _cut(histogram: list[list[int]], k: int) -> tuple[int, int]:
    """Return the bin in which the k-th largest lies (the smallest of all if there are fewer), and how many it gives."""
    totals = [sum(column) for column in zip(*histogram, strict=True)]
    wanted, cut = min(k, sum(totals)), len(totals) - 1
    while wanted > totals[cut]:
        wanted -= totals[cut]
        cut -= 1
    return cut, wanted


def _where(entries: SparseValues, keep: Tensor) -> SparseValues:
    return SparseValues(entries.indices[keep], entries.values[keep])


def _count(entries: SparseValues) -> Tensor:
    return torch.tensor([entries.indices.numel()], dtype=torch.int32, device=entries.indices.device)


def _common(mine: SparseValues, indices: Tensor) -> SparseValues:
    """Return the entries of ``mine`` at ``indices`` (K,), which ascend."""
    if not indices.numel():
        return SparseValues(indices, mine.values[:0])
    places = torch.searchsorted(indices, mine.indices).clamp_(max=indices.numel() - 1)
    return _where(mine, indices.index_select(0, places) == mine.indices)


def _factor(share: float) -> float:
    """Return how the public code moves the global threshold after ``share`` of k was applied."""
    if share < 2 / 3:
        return 1 / 1.008
    return 1.008 if share > 4 / 3 else 1.0
