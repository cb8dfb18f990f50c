"""Exactly k in every step: all ranks derive one threshold from the counts that they exchange anyway."""

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from micro import kernels
from micro.selectors.histogram import SHIFT, magnitude_bins
from micro.selectors.micro_rules.base import Found, Search, ThresholdRule, everything

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
    """

    lowest_bits: int | None = None
    shift: int = 18
    surplus: float = SURPLUS


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

    This rule is of this project; the slices and their rotation are MiCRO's.
    """

    def start(self) -> AgreedState:
        """Return the state before the first step."""
        return AgreedState()

    def search(self, state: AgreedState, search: Search) -> Found:
        """Take exactly k over all ranks, or all that is not zero where that is less; at a density of 1 everything."""
        if search.wants_all:
            state.lowest_bits = None
            return everything(search)
        k = search.step.target_count
        known = state.lowest_bits is not None
        if not known:
            _reset_candidates(state, search)
        candidates, magnitudes, counts = _collect(state, search)
        state.surplus = max(SURPLUS, state.surplus * 0.5 ** (1 / (MEMORY * search.comm.world_size)))
        if known and _total(counts) < k:
            state.surplus = min(2 * state.surplus, MAX_SURPLUS)
            _reset_candidates(state, search)
            candidates, magnitudes, counts = _collect(state, search)
        cut = _Cut.at(counts, k)
        kept = _kept(state, magnitudes, cut, cut.shares[search.comm.rank])
        threshold = _between(state, cut)
        taken = tuple(sum(row[cut.bin + 1 :]) + share for row, share in zip(counts, cut.shares, strict=True))
        _prepare_next(state, threshold, cut, _total(counts), k)
        return Found(candidates.index_select(0, kept), taken, threshold)


@dataclass(frozen=True, slots=True)
class _Cut:
    """The bin in which the k-th magnitude lies, the share of it that is kept, and each rank's part of that."""

    bin: int
    fraction: float
    shares: list[int]

    @classmethod
    def at(cls, counts: list[list[int]], k: int) -> "_Cut":
        totals = [sum(column) for column in zip(*counts, strict=True)]
        above, last = 0, len(totals) - 1
        while last > 0 and above + totals[last] < k:
            above += totals[last]
            last -= 1
        inside = totals[last]
        missing = min(k - above, inside)
        return cls(last, missing / inside if inside else 1.0, _apportion(missing, [row[last] for row in counts]))


def _apportion(missing: int, counts: list[int]) -> list[int]:
    """Split ``missing`` over ranks in proportion to ``counts``, by largest remainder; low ranks first among equals."""
    total = sum(counts)
    if not total:
        return [0] * len(counts)
    shares = [missing * count // total for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda rank: (-(missing * counts[rank] % total), rank))
    for rank in by_remainder[: missing - sum(shares)]:
        shares[rank] += 1
    return shares


def _collect(state: AgreedState, search: Search) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Return this rank's candidates, their magnitudes, and every rank's counts by bin (n x NUM_CANDIDATE_BINS)."""
    assert state.lowest_bits is not None
    candidates, magnitudes = kernels.above_with_magnitudes(search.slice, _magnitude(state.lowest_bits))
    magnitudes = magnitudes.to(torch.float32)
    mine = torch.bincount(_bins(state, magnitudes), minlength=NUM_CANDIDATE_BINS).to(torch.int32)
    counts: list[list[int]] = search.comm.gather_rows(mine).tolist()  # host sync: counts shape the next message
    return candidates, magnitudes, counts


def _bins(state: AgreedState, magnitudes: Tensor) -> Tensor:
    assert state.lowest_bits is not None
    return ((magnitudes.view(torch.int32) - state.lowest_bits) >> state.shift).clamp_(0, NUM_CANDIDATE_BINS - 1)


def _kept(state: AgreedState, magnitudes: Tensor, cut: _Cut, share: int) -> Tensor:
    """Return the ascending places among the candidates of all above the cut's bin and the ``share`` largest in it."""
    bins = _bins(state, magnitudes)
    inside = torch.nonzero(bins == cut.bin).view(-1)
    chosen = inside.index_select(0, kernels.largest(magnitudes.index_select(0, inside), share))
    keep = bins > cut.bin
    keep[chosen] = True
    return torch.nonzero(keep).view(-1)


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


def _total(counts: list[list[int]]) -> int:
    return sum(map(sum, counts))


def _magnitude(bits: int) -> float:
    value: float = struct.unpack("=f", struct.pack("=i", bits))[0]
    return value


def _float_bits(value: float) -> int:
    bits: int = struct.unpack("=i", struct.pack("=f", min(value, 3.4e38)))[0]
    return bits
