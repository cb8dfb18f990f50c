"""MiCRO's default threshold rule: all ranks derive a cut for exactly k from the counts that they exchange."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from micro import kernels
from micro.comm.ranks import Comm
from micro.comm.requests import AllGather, AllReduce, Once, Reduction, known
from micro.kernels.reference import NUM_BINS, bits_of_magnitude, magnitude_of
from micro.predicted_traffic import COUNT_BYTES, Calls
from micro.selectors import scans
from micro.values.sparse import Selection, Step

SURPLUS = 2.0  # candidates per selected index, since the threshold may fall between two steps
MEMORY = 4  # rotations of the slices until a doubled surplus is halved again
MAX_SURPLUS = 32.0
MAX_ROOM = math.log(16.0)  # limits extrapolation from a flat stretch of the tail
SMALLEST_BITS = 1  # the smallest positive magnitude: a candidate is never zero
BEYOND_BITS = 0x7F800001  # above the bits of all numbers


S = TypeVar("S")

SHIFT = 20  # a bin is a float32's exponent and its three highest mantissa bits: 6 to 12 % wide
NUM_MAGNITUDE_BINS = 0x7F800000 >> SHIFT  # up to infinity, exclusive


def magnitude_bins(x: Tensor) -> Tensor:
    """Return (NUM_MAGNITUDE_BINS,) int32 counts of ``x`` (m,) by magnitude; zeros, NaN and infinity are not counted."""
    return kernels.magnitude_counts(x, first_bit_pattern=0, shift=SHIFT, num_bins=NUM_MAGNITUDE_BINS)


@dataclass(frozen=True, slots=True)
class Search:
    """One rank's search of one step.

    Attributes:
        slice: this rank's part (m,) of the accumulator, may be empty.
        numel: total length of all slices.
        spans: (start, stop) of all ranks' slices.
        step: equal on all ranks.
        comm: the ranks.
    """

    slice: Tensor
    numel: int
    spans: tuple[tuple[int, int], ...]
    step: Step
    comm: Comm

    @property
    def start(self) -> int:
        """Where this rank's slice begins."""
        return self.spans[self.comm.rank][0]

    def everything(self) -> Selection | None:
        """Return all indices of the slice at density 1, including zeros; otherwise None. All ranks know the counts."""
        if self.step.target_count < self.numel:
            return None
        indices = torch.arange(*self.spans[self.comm.rank], dtype=torch.int32, device=self.slice.device)
        return Selection(indices, counts=tuple(stop - start for start, stop in self.spans), threshold=0.0)


class ThresholdRule(ABC, Generic[S]):
    """Sets the threshold. The state is equal on all ranks, because it depends only on data that all ranks have."""

    state: ClassVar[type[Any]]

    @abstractmethod
    def search(self, state: S, search: Search) -> Reduction[Selection]:
        """Select from the slice; return indices in the whole vector, all ranks' counts and the threshold."""

    @abstractmethod
    def calls(self, count: int, numel: int) -> Calls:
        """Return the collectives of a steady step that selects ``count`` of ``numel``."""


class Cut(NamedTuple):
    """The bin of the k-th magnitude, and how many of its elements are kept; equal on all ranks.

    Attributes:
        bin: its number; higher bins are kept completely.
        fraction: share of the bin that is kept.
        shares: elements of the bin that each rank keeps.
        taken: elements that each rank keeps in all.
        num_candidates: of all ranks.
    """

    bin: int
    fraction: float
    shares: tuple[int, ...]
    taken: tuple[int, ...]
    num_candidates: int


@dataclass(slots=True)
class AgreedState:
    """What all ranks know before a step.

    Attributes:
        lowest_bits: the lowest candidate's magnitude, as bits of a float32; 0 if it must be searched.
        shift: log2 of the number of bit patterns per bin.
        surplus: candidates per selected index; doubled after every step with too few.
    """

    lowest_bits: int = 0
    shift: int = 18
    surplus: float = SURPLUS

    def resolve(self, lowest_bits: int, highest_bits: int) -> None:
        """Start the candidates at ``lowest_bits``, with the narrowest bins that reach ``highest_bits``."""
        self.lowest_bits = max(lowest_bits, SMALLEST_BITS)
        self.shift = max((highest_bits - self.lowest_bits) // NUM_BINS, 0).bit_length()

    def start_of(self, bin: int) -> int:
        """Return the lowest bits of a bin."""
        return self.lowest_bits + (bin << self.shift)

    def threshold(self, cut: Cut) -> float:
        """Return the threshold, interpolated inside the cut's bin by the kept fraction."""
        return magnitude_of(self.start_of(cut.bin) + round((1 << self.shift) * (1.0 - cut.fraction)))

    def prepare_next(self, threshold: float, cut: Cut, k: int) -> None:
        """Set the next step's candidates from the slope of the tail between lowest candidate and threshold."""
        lowest = magnitude_of(self.lowest_bits)
        if cut.bin == NUM_BINS - 1 or cut.num_candidates <= k or threshold <= lowest:
            self.lowest_bits = 0  # the cut is outside the bins
            return
        slope = math.log(cut.num_candidates / k) / math.log(threshold / lowest)
        room = min(math.log(self.surplus) / slope, MAX_ROOM)
        highest = threshold * math.exp(2 * room)  # in log count, twice as far above as the room below
        self.resolve(bits_of_magnitude(threshold * math.exp(-room)), bits_of_magnitude(highest))


class _Candidates(NamedTuple):
    """This rank's candidates, and the cut."""

    indices: Tensor
    magnitudes: Tensor
    cut: Cut


@dataclass(frozen=True, slots=True)
class Agreed(ThresholdRule[AgreedState]):
    """Collect candidates above a slightly lower threshold, count them by magnitude on all ranks, and cut at exactly k.

    Bins are ranges of float32 bit patterns, which order like magnitudes: computing a bin takes a subtraction and a
    shift, and its edges are exact. All ranks exchange their counts (one all-gather of 128 bytes, in place of the single
    count of other rules) and find the bin of the k-th magnitude. Each rank keeps everything above that bin and its
    share of the rest from inside it, largest first: exactly k in all, if k elements are not zero. Elements that are
    zero on the rank that searches them are never candidates. If k is the whole vector, everything is selected, zeros
    too.

    If there are fewer than k candidates (first step, or the gradients' scale fell), all ranks see it in the counts.
    They then collect again, above a threshold from a histogram of the whole vector (one all-reduce).

    This rule is from this project; the slices and their rotation are MiCRO's.
    """

    state: ClassVar[type[AgreedState]] = AgreedState

    def search(self, state: AgreedState, search: Search) -> Reduction[Selection]:
        """Select exactly k over all ranks, or all nonzero elements if fewer; everything at density 1."""
        everything = search.everything()
        if everything is not None:
            state.lowest_bits = 0
            return everything
        k, rank, n = search.step.target_count, search.comm.rank, search.comm.world_size
        is_known = bool(state.lowest_bits)
        if not is_known:
            yield from _reset_candidates(state, search)
        found = yield from _find_candidates(state, search)
        state.surplus = max(SURPLUS, state.surplus * 0.5 ** (1 / (MEMORY * n)))
        if is_known and found.cut.num_candidates < k:
            state.surplus = min(2 * state.surplus, MAX_SURPLUS)
            yield from _reset_candidates(state, search)
            found = yield from _find_candidates(state, search)
        mine, threshold = _kept_indices(state, found, rank), state.threshold(found.cut)
        state.prepare_next(threshold, found.cut, k)
        return Selection(mine, counts=found.cut.taken, threshold=threshold)

    def calls(self, count: int, numel: int) -> Calls:
        """Return the all-gather of counts by magnitude; nothing at density 1."""
        return () if count == numel else (("gather_rows", COUNT_BYTES * NUM_BINS),)


def _find_candidates(state: AgreedState, search: Search) -> Reduction[_Candidates]:
    """Return this rank's candidates, and the cut from all ranks' counts, after one all-gather."""
    mine = yield from scans.collect(search.slice, search.start, state.lowest_bits, state.shift)
    indices, magnitudes, own_counts = mine
    (counts,) = yield from known((yield AllGather(mine=own_counts)))
    place: Cut = yield Once(work=lambda: cut(counts, search.step.target_count))
    return _Candidates(indices, magnitudes, place)


def _kept_indices(state: AgreedState, found: _Candidates, rank: int) -> Tensor:
    """Return the ascending indices of the candidates that this rank keeps above and inside the cut's bin."""
    cut = found.cut
    bottom, top = state.start_of(cut.bin), BEYOND_BITS
    if cut.bin < NUM_BINS - 1:
        top = min(state.start_of(cut.bin + 1), BEYOND_BITS)
    return kernels.keep(found.indices, found.magnitudes, cut.taken[rank], bottom, top, cut.shares[rank])


def _reset_candidates(state: AgreedState, search: Search) -> Reduction[None]:
    """Set the state so that surplus * k elements (or all nonzero ones) are candidates, and the bins cover the cut."""
    k = search.step.target_count
    totals = yield AllReduce(mine=magnitude_bins(search.slice), kind="counts")
    wanted = state.surplus * k, k / state.surplus**2
    lowest, highest = yield Once(work=lambda: _bins_reached(totals, wanted))
    state.resolve(lowest << SHIFT, (highest + 1) << SHIFT)


def _bins_reached(totals: Tensor, wanted: Sequence[float]) -> list[int]:
    """Return for each number the highest bin with so many elements in or above it, or else the lowest used bin."""
    reached = totals.flip(0).cumsum(0).flip(0)  # elements in each bin and above
    there = max(int(reached[0]), 1)  # host sync: only if candidates were too few
    return [max(int((reached >= min(number, there)).sum()) - 1, 0) for number in wanted]


def cut(counts: Tensor, k: int) -> Cut:
    """Return the bin of the k-th magnitude, and how many elements each rank keeps: k in all, or all there are.

    Ranks keep elements of that bin in proportion to their counts, by largest remainder; ties go to lower ranks.

    Args:
        counts: (world_size, NUM_BINS) int32, in the host's memory.
    """
    rows = counts.tolist()
    totals = [*map(sum, zip(*rows, strict=True))]
    above, last = 0, NUM_BINS - 1
    while last > 0 and above + totals[last] < k:
        above += totals[last]
        last -= 1
    inside = totals[last]
    missing = min(k - above, inside)
    shares = _apportion(missing, [row[last] for row in rows], inside)
    taken = tuple(sum(row[last + 1 :]) + share for row, share in zip(rows, shares, strict=True))
    return Cut(last, missing / inside if inside else 1.0, tuple(shares), taken, sum(totals))


def _apportion(missing: int, counts: list[int], total: int) -> list[int]:
    """Split ``missing`` over ranks in proportion to ``counts`` (world_size,), whose sum is ``total``."""
    if missing == total:
        return counts
    shares, rests = zip(*(divmod(count * missing, total) for count in counts), strict=True)
    order = sorted(range(len(counts)), key=lambda rank: -rests[rank])
    rounded_up = set(order[: missing - sum(shares)])
    return [share + (rank in rounded_up) for rank, share in enumerate(shares)]
