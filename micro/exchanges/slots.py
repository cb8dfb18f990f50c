"""Entries on their way to regions in slots whose lengths follow from the last step: an accelerator's host reads none.

Lists of exact lengths need a read of these lengths before they leave. Slots need none: each has room for as many
entries as went the same way in the last step, and for some more. What arrived, and whether all had room, is read with
what a step reads anyway. Where a slot was too short the step is made once more with lists of exact lengths.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from micro.exchanges.regions import Spans, Transport
from micro.on_device import on_device
from micro.parts import NoState
from micro.sparse import BEYOND, Padded, SparseValues, soonest_summed_lists

ROOTS = 3.0  # of the last count, of room beyond it: a count x differs by chance by about sqrt(2 x)
LEAST, MOST, LESS = 0.05, 1.6, 0.97  # share of room beyond that; doubled by a slot that was too short, then falling
FULLEST = 1.5  # times what lists of exact lengths take, for equal regions: more is not sent for a read


@dataclass(slots=True)
class Slots(NoState):
    """How many entries went which way in the last step of an accelerator.

    Two ranks know the same of what goes from one to the other. Nothing of it is saved: the first step after a
    checkpoint is loaded sends lists of exact lengths.

    Attributes:
        leaving: from this rank to each region; empty before the first step.
        coming: from each rank to this rank's region.
        share: of room beyond these, the same on all ranks.
    """

    leaving: tuple[int, ...] = ()
    coming: tuple[int, ...] = ()
    share: float = LEAST

    def serve(self, k: int, like: Tensor, transport: Transport) -> bool:
        """Return whether entries travel in slots: on an accelerator, once their number is known, at little cost.

        The same on all ranks.

        Args:
            k: entries that a rank is expected to send.
            like: what values are like.
        """
        n = transport.comm.world_size
        if n == 1 or like.device.type == "cpu" or len(self.leaving) != n or not transport.in_rows(like.dtype):
            return False
        return _length(k / n, self.share) * n <= FULLEST * k

    def learn(self, leaving: Sequence[int], coming: Sequence[int]) -> None:
        """Remember how many entries went which way."""
        self.leaving, self.coming = tuple(leaving), tuple(coming)
        self.share = max(LEAST, LESS * self.share)

    def widen(self) -> None:
        """Give more room from now on, on all ranks, where a slot of any rank was too short."""
        self.share = min(2 * self.share, MOST)

    def lengths(self) -> tuple[list[int], list[int]]:
        """Return the lengths of the slots that leave, and of those that come."""
        return [_length(count, self.share) for count in self.leaving], [
            _length(count, self.share) for count in self.coming
        ]


def _length(count: float, share: float) -> int:
    count = max(count, 1)
    return math.ceil((1 + share) * count + ROOTS * math.sqrt(count))


@dataclass(frozen=True, slots=True)
class SlottedSums:
    """The sums in this rank's region, if the slots of all ranks were long enough.

    Attributes:
        sums: added in rank order.
        fit: () bool, whether what this rank sent had room.
        numbers: (2 world_size,) int64, how many entries left for each region, and came from each rank.
    """

    sums: Padded
    fit: Tensor
    numbers: Tensor


def add_up_in_slots(entries: SparseValues, regions: Spans, slots: Slots, transport: Transport) -> SlottedSums:
    """Send every entry to the rank in whose region it lies, as `Transport.add_up` does; the host reads nothing."""
    leaving, coming = slots.lengths()
    ends = torch.searchsorted(entries.indices, on_device([b for _, b in regions], torch.int32, entries.indices.device))
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    rooms = on_device(leaving, torch.int64, ends.device)
    placed = _placed(entries, starts, ends, rooms, sum(leaving))
    received = transport.scatter_rows(placed, leaving, coming)
    sizes = ends - starts
    numbers = torch.cat([sizes, _filled(received.indices, coming)])
    return SlottedSums(soonest_summed_lists(received, coming), (sizes <= rooms).all(), numbers)


def _placed(entries: SparseValues, starts: Tensor, ends: Tensor, rooms: Tensor, total: int) -> SparseValues:
    """Return the slots (total,), one after the other, with what has room in them; `BEYOND` in empty places.

    Args:
        starts, ends: (world_size,) where the entries for each region lie.
        rooms: (world_size,) of the slots.
    """
    place = torch.arange(entries.indices.numel(), device=ends.device)
    region = torch.searchsorted(ends, place, right=True)  # the last one, after all, is of entries that go nowhere
    stops = rooms.cumsum(0)
    firsts, stops, shifts = (
        _with_none(x).index_select(0, region) for x in (stops - rooms, stops, stops - rooms - starts)
    )
    target = place + shifts
    target = target.where((target >= firsts) & (target < stops), total)  # a place beyond the end
    indices = entries.indices.new_full((total + 1,), BEYOND).scatter_(0, target, entries.indices)
    values = entries.values.new_zeros(total + 1).scatter_(0, target, entries.values)
    return SparseValues(indices[:total], values[:total])


def _with_none(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1)])


def _filled(indices: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return how many places of each of neighbouring slots, none of which has length 0, are not empty."""
    lasts = on_device([end - 1 for end in accumulate(lengths)], torch.int64, indices.device)
    return (indices != BEYOND).cumsum(0).index_select(0, lasts).diff(prepend=lasts.new_zeros(1))
