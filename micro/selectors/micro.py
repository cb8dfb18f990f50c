"""The selector micro (MiCRO): one threshold, agreed on by all ranks, and an exclusive slice of the vector for each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from torch import Tensor

from micro import kernels
from micro.comm.ranks import Comm
from micro.comm.requests import AllGather, AllReduce, Once, Reduction, known
from micro.density.base import target_count
from micro.kernels.magnitudes import NUM_BINS, bits_of_magnitude, magnitude_of
from micro.parts import check_rule
from micro.predicted_traffic import COUNT_BYTES, Calls, Choosing
from micro.selectors import scans
from micro.selectors.base import Selector, Traits
from micro.selectors.micro_rules import Search, ThresholdRule
from micro.selectors.micro_rules.published import Published
from micro.values.flat import Layout
from micro.values.sparse import Overlap, Selection, Step, cyclic, equal_slices

MicroRule = Literal["agreed", "published"]

SURPLUS = 2.0  # candidates per selected index, since the threshold may fall between two steps
MEMORY = 4  # rotations of the slices until a doubled surplus is halved again
MAX_SURPLUS = 32.0
MAX_ROOM = math.log(16.0)  # limits extrapolation from a flat stretch of the tail
SMALLEST_BITS = 1  # the smallest positive magnitude: a candidate is never zero
BEYOND_BITS = 0x7F800001  # above the bits of all numbers
SHIFT = 20  # a bin is a float32's exponent and its three highest mantissa bits: 6 to 12 % wide
NUM_MAGNITUDE_BINS = 0x7F800000 >> SHIFT  # up to infinity, exclusive


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

    def range_of(self, bin: int) -> tuple[int, int]:
        """Return the lowest bits of a bin, and those of the next one."""
        start = self.lowest_bits + (bin << self.shift)
        return start, BEYOND_BITS if bin == NUM_BINS - 1 else min(start + (1 << self.shift), BEYOND_BITS)

    def prepare_next(self, cut: Cut, k: int) -> float:
        """Set the next step's candidates from the slope of the tail between lowest candidate and threshold.

        Returns:
            the threshold of this step, interpolated inside the cut's bin by the kept fraction.
        """
        start = self.lowest_bits + (cut.bin << self.shift)
        threshold = magnitude_of(start + round((1 << self.shift) * (1.0 - cut.fraction)))
        lowest = magnitude_of(self.lowest_bits)
        if cut.bin == NUM_BINS - 1 or cut.num_candidates <= k or threshold <= lowest:
            self.lowest_bits = 0  # the cut is outside the bins
            return threshold
        slope = math.log(cut.num_candidates / k) / math.log(threshold / lowest)
        room = min(math.log(self.surplus) / slope, MAX_ROOM)
        highest = threshold * math.exp(2 * room)  # in log count, twice as far above as the room below
        self.resolve(bits_of_magnitude(threshold * math.exp(-room)), bits_of_magnitude(highest))
        return threshold


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
        k, rank, n = search.step.target_count, search.comm.rank, search.comm.world_size
        start, _ = search.spans[rank]
        if k >= search.numel:
            state.lowest_bits = 0
            return search.everything()
        surplus = max(SURPLUS, state.surplus * 0.5 ** (1 / (MEMORY * n)))
        while True:
            is_new = not state.lowest_bits
            if is_new:
                yield from _reset_candidates(state, search)
            found = yield from scans.collect(search.slice, start, state.lowest_bits, state.shift)
            indices, magnitudes, own_counts = found
            (counts,) = yield from known((yield AllGather(mine=own_counts)))
            cut: Cut = yield Once(work=partial(cut_of, counts, k))
            if is_new or cut.num_candidates >= k:
                break
            surplus = state.surplus = min(2 * surplus, MAX_SURPLUS)
            state.lowest_bits = 0
        bottom, top = state.range_of(cut.bin)
        mine = kernels.keep(indices, magnitudes, cut.taken[rank], bottom, top, cut.shares[rank])
        state.surplus = surplus
        return Selection(mine, counts=cut.taken, threshold=state.prepare_next(cut, k))

    def calls(self, count: int, numel: int) -> Calls:
        """Return the all-gather of counts by magnitude; nothing at density 1."""
        return () if count == numel else (("gather_rows", COUNT_BYTES * NUM_BINS),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Micro(Selector[Any]):
    """Select by one threshold inside a rotating, exclusive slice of the vector.

    Each rank searches one of world_size equal slices, so index sets never overlap (no build-up) and the search costs
    numel / world_size. All ranks use the same threshold, which the rule sets.

    Args:
        rule: 'agreed': exactly k, because all ranks derive the threshold from counts that they exchange anyway
            (see `Agreed`). 'published': the authors' public code, step for step (`micro_rules.published`).

    Source: Yoon and Oh, MiCRO, HiPC 2023, arXiv 2310.00967. Differences: int32 indices; k is at least 1; except for
    rule 'published', the threshold (code: a controller that starts at 1 / (2 sqrt k)), and an empty slice sends nothing
    (code: one arbitrary coordinate).

    Raises:
        ValueError: no such rule.
    """

    rule: MicroRule = "agreed"
    name: ClassVar[str] = "micro"
    overlap: ClassVar[Overlap] = Overlap.DISJOINT
    traits: ClassVar[Traits] = Traits.TAKES_SCALES

    def __post_init__(self) -> None:
        check_rule(self, get_args(MicroRule))

    @cached_property
    def threshold_rule(self) -> ThresholdRule[Any]:
        """The object that implements the rule."""
        return Agreed() if self.rule == "agreed" else Published()

    @property
    def state(self) -> type[Any]:  # type: ignore[override]  # depends on the rule
        """The class of the rule's state."""
        return self.threshold_rule.state

    def select(self, state: Any, acc: Tensor, step: Step, comm: Comm) -> Reduction[Selection]:
        """Return the indices of this rank's slice that pass the step's threshold."""
        spans = cyclic(equal_slices(acc.numel(), comm.world_size), step.index)
        start, stop = spans[comm.rank]
        mine = acc[start:stop] if step.scales is None else step.scales.part(start, stop).scaled(acc[start:stop])
        found = yield from self.threshold_rule.search(state, Search(mine, acc.numel(), spans, step, comm))
        return Selection(found.indices, found.counts, spans, found.threshold)

    def volume(self, layout: Layout, density: float, world_size: int) -> Choosing:
        """Return the messages of the rule; see Selector."""
        calls = self.threshold_rule.calls(target_count(density, layout.numel), layout.numel)
        return Choosing(calls=calls, knows_counts=True, searches="range")


def _reset_candidates(state: AgreedState, search: Search) -> Reduction[None]:
    """Set the state so that surplus * k elements (or all nonzero ones) are candidates, and the bins cover the cut."""
    k = search.step.target_count
    mine = kernels.magnitude_counts(search.slice, first_bit_pattern=0, shift=SHIFT, num_bins=NUM_MAGNITUDE_BINS)
    totals = yield AllReduce(mine=mine, kind="counts")
    wanted = state.surplus * k, k / state.surplus**2
    lowest, highest = yield Once(work=lambda: _bins_reached(totals, wanted))
    state.resolve(lowest << SHIFT, (highest + 1) << SHIFT)


def _bins_reached(totals: Tensor, wanted: Sequence[float]) -> list[int]:
    """Return for each number the highest bin with so many elements in or above it, or else the lowest used bin."""
    reached = totals.flip(0).cumsum(0).flip(0)  # elements in each bin and above
    there = max(int(reached[0]), 1)  # host sync: only if candidates were too few
    return [max(int((reached >= min(number, there)).sum()) - 1, 0) for number in wanted]


def cut_of(counts: Tensor, k: int) -> Cut:
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
    taken = [sum(row[last + 1 :]) + share for row, share in zip(rows, shares, strict=True)]
    return Cut(last, missing / inside if inside else 1.0, tuple(shares), tuple(taken), sum(totals))


def _apportion(missing: int, counts: list[int], total: int) -> list[int]:
    """Split ``missing`` over ranks in proportion to ``counts`` (world_size,), whose sum is ``total``."""
    if missing == total:
        return counts
    shares = [count * missing // total for count in counts]
    rests = [-(count * missing % total) for count in counts]
    for rank in sorted(range(len(counts)), key=rests.__getitem__)[: missing - sum(shares)]:
        shares[rank] += 1
    return shares
