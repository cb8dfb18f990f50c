"""From the counts of all ranks to what each keeps, and to the next candidates: whole numbers on the device alone.

All is integer arithmetic on what every rank has, so that all ranks find the same whatever their devices round.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from micro.kernels.candidates import NUM_BINS
from micro.selectors.histogram import SHIFT

SURPLUS = 2  # candidates wanted per selected index
HIGHEST_BITS = 0x7F000000  # 2^127: where candidates begin at most
LEAST_MARGIN, MOST_MARGIN = 1 << 5, 1 << 29  # bit patterns between the lowest candidate and the cut
REACH = 3  # the bins reach so many margins from the lowest candidate


@dataclass(frozen=True, slots=True)
class Cut:
    """What a step keeps, the same on all ranks, on their devices.

    Attributes:
        taken: (world_size,) int64, how many each rank keeps of its largest candidates.
        bits: (1,) int64, the magnitude of the cut as bits of a float32.
        given: (1,) int64, the candidates that could be kept.
        total: (1,) int64, the candidates of all ranks, however many their messages hold.
        is_highest: (1,) bool: the cut lies in the highest bin, which has no upper end.
        is_overfull: (1,) bool: a rank has more above the cut than its message holds.
    """

    taken: Tensor
    bits: Tensor
    given: Tensor
    total: Tensor
    is_highest: Tensor
    is_overfull: Tensor


def cut_at(counts: Tensor, k: int, capacity: int, place: Tensor) -> Cut:
    """Return where the largest k of all ranks end, of which each rank can give ``capacity`` at most.

    The bin in which the k-th lies is split over the ranks in proportion, by largest remainder, low ranks first.

    Args:
        counts: (world_size, NUM_BINS) of candidates by magnitude.
        place: (2,) int32, where the bins begin, as bits of a float32, and the bits that number the places within one.
    """
    reached = counts.to(torch.int64).flip(1).cumsum(1).flip(1)
    given = torch.cat([reached.clamp_max(capacity), reached.new_zeros(reached.shape[0], 1)], 1)
    totals = given.sum(0)
    number = ((totals[:NUM_BINS] >= k).sum(0, keepdim=True) - 1).clamp_min_(0)
    above = given.index_select(1, number + 1).view(-1)
    inside = given.index_select(1, number).view(-1) - above
    here = inside.sum(0, keepdim=True)
    missing = torch.minimum(k - above.sum(0, keepdim=True), here)
    taken = above + _apportioned(missing, inside, here.clamp_min(1))
    lowest, shift = place.to(torch.int64).split(1)
    bits = lowest + (number << shift) + ((here - missing) << shift) // here.clamp_min(1)
    full = (reached.index_select(1, number) > capacity).any().view(1)
    return Cut(taken, bits, totals[:1], reached[:, 0].sum(0, keepdim=True), number == NUM_BINS - 1, full)


def _apportioned(missing: Tensor, counts: Tensor, total: Tensor) -> Tensor:
    products = counts * missing
    shares = products // total
    left = missing - shares.sum(0, keepdim=True)
    order = torch.argsort(products % total, descending=True, stable=True)
    first = torch.arange(counts.numel(), device=counts.device) < left
    return shares.index_add_(0, order, first.to(torch.int64))


def next_place(place: Tensor, cut: Cut, k: int) -> Tensor:
    """Return (2,) int32 where the bins of the next step begin, so that about SURPLUS * k become candidates.

    The margin between the lowest candidate and the cut is scaled by what it held: with n candidates by k / (n - k).
    Too few that could be kept: it becomes as wide as two times all bins. A cut above all bins: they begin where they
    ended.
    """
    lowest, shift = place.to(torch.int64).split(1)
    span = NUM_BINS << shift
    margin = (cut.bits - lowest).clamp_min(1)
    scaled = torch.minimum(torch.maximum(margin * k // (cut.total - k).clamp_min(1), margin // 4), 4 * margin)
    is_enough = cut.given > k
    margin = scaled.where(is_enough, 2 * span).where(~cut.is_highest | ~is_enough, 2 * span)
    margin = margin.clamp(LEAST_MARGIN, MOST_MARGIN)
    begin = (cut.bits - margin).where(~cut.is_highest | ~is_enough, lowest + span)
    return _placed(begin, margin)


def first_place(totals: Tensor, k: int) -> Tensor:
    """Return what `next_place` does, from ``totals`` (bins,), a histogram of all magnitudes by micro.selectors."""
    reached = totals.to(torch.int64).flip(0).cumsum(0).flip(0)

    def reaching(wanted: int) -> Tensor:
        least = reached[:1].clamp(1, wanted)
        return ((reached >= least).sum(0, keepdim=True) - 1).clamp_min_(0) << SHIFT

    lowest = reaching(SURPLUS * k)
    return _placed(lowest, (reaching(k) - lowest).clamp_min_(1 << SHIFT))


def _placed(begin: Tensor, margin: Tensor) -> Tensor:
    """Return where the bins begin, and how narrow they can be where they reach REACH margins."""
    widths = 1 << torch.arange(32, device=margin.device)
    shift = (REACH * margin // NUM_BINS >= widths).sum(0, keepdim=True)
    return torch.cat([begin.clamp(1, HIGHEST_BITS), shift]).to(torch.int32)
