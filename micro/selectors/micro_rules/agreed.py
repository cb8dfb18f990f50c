"""Exactly k in every step: all ranks derive one threshold from the counts that they exchange anyway."""

import math
import struct
from dataclasses import dataclass, field

import torch
from torch import Tensor

from micro import kernels
from micro.selectors.histogram import SHIFT, magnitude_bins
from micro.selectors.micro_rules.base import Found, Search, ThresholdRule, everything
from micro.selectors.micro_rules.one_message import Room

NUM_CANDIDATE_BINS = 32  # counts each rank sends: 128 bytes
SURPLUS = 2.0  # candidates wanted per selected index: room for the threshold to fall between two steps
MEMORY = 4  # turns of the slices after which a doubled surplus is halved again
MAX_SURPLUS = 32.0
MAX_ROOM = math.log(16.0)  # a flat stretch of the tail says little about what lies below it
SMALLEST_BITS = 1  # the smallest positive magnitude: a candidate is never zero


@dataclass(slots=True)
class AgreedState:
    """What all ranks know before a step.

    Attributes:
        lowest_bits: where candidates begin, as bits of a float32; None where that must be searched.
        shift: bits that number the places within a bin.
        surplus: candidates wanted per selected index; doubled by every step that had too few.
        last: what each rank kept in the last step, where candidates travel with their counts.
    """

    lowest_bits: int | None = None
    shift: int = 18
    surplus: float = SURPLUS
    last: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Agreed(ThresholdRule[AgreedState]):
    """Collect candidates above a slightly lower threshold, count them by magnitude, and cut where the sum gives k.

    Bins are ranges of float32 bit patterns, which order like magnitudes, so that a bin costs a subtraction and a shift
    and its edges are exact. Every rank gets every rank's counts (one all-gather of 128 bytes, in place of the count
    that other rules send) and cuts at the bin in which the k-th magnitude lies. From that bin each rank keeps its
    largest, as many as its share of what is still missing: k come out exactly, whenever k elements are not zero. A rank
    sees its own accumulator only: what is zero there is no candidate, whatever other ranks hold. When k is the whole
    vector nothing is counted and every element is taken, zeros too.

    When there are fewer than k candidates (first step, or the scale of the gradients fell), all ranks see it in the
    same counts. They then collect once more, above a lower threshold from a histogram of the whole vector (one
    all-reduce).

    With ``slack`` the candidates travel in the message of their counts, as many as the last step's counts make likely
    to be enough, and this much more (`one_message`): what is kept is the same, and known to all ranks at once. Where
    that was not enough, the indices are left to a message of their own.

    This rule is of this project; the slices and their rotation are MiCRO's.
    """

    slack: float | None = None

    def start(self) -> AgreedState:
        """Return the state before the first step."""
        return AgreedState()

    def search(self, state: AgreedState, search: Search) -> Found:
        """Take exactly k over all ranks, or all that is not zero where that is less; at a density of 1 everything."""
        if search.wants_all:
            state.lowest_bits, state.last = None, []
            return everything(search)
        k, room = search.step.target_count, self._room(state, search)
        known = state.lowest_bits is not None
        if not known:
            _reset_candidates(state, search)
        found = _collect(state, search, room)
        state.surplus = max(SURPLUS, state.surplus * 0.5 ** (1 / (MEMORY * search.comm.world_size)))
        if known and found.num_candidates < k:
            state.surplus = min(2 * state.surplus, MAX_SURPLUS)
            _reset_candidates(state, search)
            found = _collect(state, search, room)
        cut = _Cut.at(found, k)
        threshold = _between(state, cut)
        _prepare_next(state, threshold, cut, found.num_candidates, k)
        state.last = [] if self.slack is None else list(cut.taken)
        rank, everyone = search.comm.rank, None
        if room is not None and found.everyone is not None:
            everyone = room.kept(found.everyone, found.counts, cut.taken)
        if everyone is None:
            indices = found.indices.index_select(0, _kept(found, cut, rank))
            return Found(indices, cut.taken, threshold, overfull=room is not None)
        first = sum(cut.taken[:rank])
        mine = everyone[first : first + cut.taken[rank]] - search.spans[rank][0]
        return Found(mine, cut.taken, threshold, everyone)

    def _room(self, state: AgreedState, search: Search) -> Room | None:
        """Return the room for candidates in this step's message; None where they do not travel in it."""
        if self.slack is None or len(state.last) != search.comm.world_size:
            return None
        longest = max(stop - start for start, stop in search.spans)
        return Room.after(state.last, search.step.target_count, self.slack, longest)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """What passes the lower threshold in this rank's slice, and how much of it all ranks have.

    Attributes:
        indices, magnitudes, bins: (m,) of this rank; int32, float32, int32.
        counts: (world_size, NUM_CANDIDATE_BINS) int32, of every rank by bin; in the host's memory.
        totals: of all ranks by bin.
        everyone: (world_size, capacity) int32, the indices in the vector that each rank's message held, if any.
    """

    indices: Tensor
    magnitudes: Tensor
    bins: Tensor
    counts: Tensor
    totals: list[int]
    everyone: Tensor | None

    @property
    def num_candidates(self) -> int:
        """Number of candidates of all ranks."""
        return sum(self.totals)


@dataclass(frozen=True, slots=True)
class _Cut:
    """The bin in which the k-th magnitude lies, and what is kept of it.

    Attributes:
        bin: its number; all above it is kept.
        fraction: the part of it that is kept.
        shares: (world_size,) int64, how many of it each rank keeps.
        taken: how many each rank keeps in all.
    """

    bin: int
    fraction: float
    shares: Tensor
    taken: tuple[int, ...]

    @classmethod
    def at(cls, found: _Candidates, k: int) -> "_Cut":
        above, last = 0, len(found.totals) - 1
        while last > 0 and above + found.totals[last] < k:
            above += found.totals[last]
            last -= 1
        inside = found.totals[last]
        missing = min(k - above, inside)
        shares = _apportion(missing, found.counts[:, last], inside)
        taken = found.counts[:, last + 1 :].sum(1).add_(shares).tolist()
        return cls(last, missing / inside if inside else 1.0, shares, tuple(taken))


def _apportion(missing: int, counts: Tensor, total: int) -> Tensor:
    """Split ``missing`` over ranks in proportion to ``counts`` (world_size,), whose sum is ``total``.

    By largest remainder; low ranks first among equals. The product of two numbers of elements fits into int64.
    """
    if missing == total:
        return counts
    products = counts.to(torch.int64) * missing
    shares = products // total
    left = missing - int(shares.sum())
    if left:
        shares[torch.argsort(products % total, descending=True, stable=True)[:left]] += 1
    return shares


def _collect(state: AgreedState, search: Search, room: Room | None) -> _Candidates:
    """Return this rank's candidates, and every rank's counts and the candidates in its message: one all-gather."""
    assert state.lowest_bits is not None
    indices, magnitudes = kernels.above_with_magnitudes(search.slice, _magnitude(state.lowest_bits))
    magnitudes = magnitudes.to(torch.float32)
    bins = ((magnitudes.view(torch.int32) - state.lowest_bits) >> state.shift).clamp_(0, NUM_CANDIDATE_BINS - 1)
    row = torch.bincount(bins, minlength=NUM_CANDIDATE_BINS).to(torch.int32)
    everyone = None
    if room is None:
        counts = search.comm.gather_rows(row)
    else:
        places = indices + search.spans[search.comm.rank][0]
        rows = search.comm.gather_rows(room.message(row, bins, magnitudes, places, search.comm.rank), "indices")
        counts, everyone = rows[:, :NUM_CANDIDATE_BINS], rows[:, NUM_CANDIDATE_BINS:]
    counts = counts.cpu()  # host sync: counts shape the next message
    return _Candidates(indices, magnitudes, bins, counts, counts.sum(0).tolist(), everyone)


def _kept(found: _Candidates, cut: _Cut, rank: int) -> Tensor:
    """Return the ascending places, among the candidates, of this rank's largest above and inside the cut's bin.

    Of equal magnitudes the lowest index is kept.
    """
    share = int(cut.shares[rank])
    if not share:
        return torch.nonzero(found.bins > cut.bin).view(-1)
    inside = found.magnitudes[found.bins == cut.bin]
    smallest = torch.kthvalue(inside, inside.numel() - share + 1).values
    kept = torch.nonzero(found.magnitudes >= smallest).view(-1)
    surplus = kept.numel() - cut.taken[rank]
    if not surplus:
        return kept
    ties = torch.nonzero(found.magnitudes.index_select(0, kept) == smallest).view(-1)
    keep = torch.ones_like(kept, dtype=torch.bool)
    keep[ties[-surplus:]] = False
    return kept[keep]


def _reset_candidates(state: AgreedState, search: Search) -> None:
    """Set the state so that surplus * k elements, or all that are not zero, become candidates, and the bins reach k."""
    k = search.step.target_count
    totals = search.comm.all_reduce_(magnitude_bins(search.slice), "counts")
    reached = totals.flip(0).cumsum(0).flip(0)  # elements in each bin and above
    highest_bits = (_bin_reached(reached, k / state.surplus**2) + 1) << SHIFT
    _resolve(state, _bin_reached(reached, state.surplus * k) << SHIFT, highest_bits)


def _bin_reached(reached: Tensor, wanted: float) -> int:
    """Return the highest bin that ``wanted`` elements reach, or the lowest that holds any where they are fewer."""
    there = max(int(reached[0]), 1)  # host sync: only when the cut was lost
    return max(int((reached >= min(wanted, there)).sum()) - 1, 0)


def _resolve(state: AgreedState, lowest_bits: int, highest_bits: int) -> None:
    """Begin the candidates at ``lowest_bits`` and make the bins as narrow as reaching ``highest_bits`` allows."""
    state.lowest_bits = max(lowest_bits, SMALLEST_BITS)
    state.shift = max((highest_bits - state.lowest_bits) // NUM_CANDIDATE_BINS, 0).bit_length()


def _between(state: AgreedState, cut: _Cut) -> float:
    """Return the threshold inside the cut's bin, between its edges in proportion to what was kept."""
    assert state.lowest_bits is not None
    lower = state.lowest_bits + (cut.bin << state.shift)
    return _magnitude(lower + round((1 << state.shift) * (1.0 - cut.fraction)))


def _prepare_next(state: AgreedState, threshold: float, cut: _Cut, num_candidates: int, k: int) -> None:
    """Place the next step's candidates by the slope of the tail between the lowest candidate and the threshold."""
    assert state.lowest_bits is not None
    lowest = _magnitude(state.lowest_bits)
    if cut.bin == NUM_CANDIDATE_BINS - 1 or num_candidates <= k or threshold <= lowest:
        state.lowest_bits = None  # the cut lies outside the bins
        return
    slope = math.log(num_candidates / k) / math.log(threshold / lowest)
    room = min(math.log(state.surplus) / slope, MAX_ROOM)
    next_lowest = threshold * math.exp(-room)
    highest = threshold * math.exp(2 * room)  # as far above in log count as twice the room below
    _resolve(state, _float_bits(next_lowest), _float_bits(highest))


def _magnitude(bits: int) -> float:
    value: float = struct.unpack("=f", struct.pack("=i", bits))[0]
    return value


def _float_bits(value: float) -> int:
    bits: int = struct.unpack("=i", struct.pack("=f", min(value, 3.4e38)))[0]
    return bits
