"""A settled step of Ok-Topk on an accelerator: nothing of it is read before all of it is known."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from micro.exchanges.moving_regions import OktopkState, RegionStep
from micro.exchanges.regions import Transport
from micro.exchanges.slots import add_up_in_slots
from micro.exchanges.sums_in_rows import Found, capacity_after, gather_largest_unread
from micro.health import Finite
from micro.on_device import on_device
from micro.sparse import BEYOND, Padded, Selection, SparseValues, Step, first_of

TOO_SHORT, NOT_LISTED = 1, 2  # of a status: a slot had no room for all; the choice has to be read, or made, once more


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of a step.

    Attributes:
        selection: what this rank chose, read.
        mine: its entries.
        sums: of this rank's region; None, on all ranks alike, where a slot of any rank was too short or its choice was
            not known.
        found: the largest sums; None, on all ranks alike, where a row was too short.
    """

    selection: Selection
    mine: SparseValues
    sums: Padded | None
    found: Found | None


def sums_in_slots(
    state: OktopkState, acc: Tensor, selection: Selection, step: Step, transport: Transport, *, is_finite: Finite
) -> Tried:
    """Add up in regions and find the largest sums, by one read in all.

    Args:
        selection: of this rank, which may be unread.
    """
    n, k, listed = transport.comm.world_size, step.target_count, selection.unread
    mine, numbers = _entries(acc, selection)
    capacity = capacity_after(state, k, transport)
    assert capacity is not None, "as reads_late has found"
    added = add_up_in_slots(mine.entries, tuple(pairwise(state.boundaries)), state.slots, transport)
    status = torch.where(added.fit, 0, TOO_SHORT).to(torch.int32).view(1)
    if listed is not None:
        status += torch.where(listed.is_listed(), 0, NOT_LISTED).to(torch.int32)
    received = gather_largest_unread(
        added.sums,
        k,
        capacity,
        RegionStep(step, mine.entries, is_finite, transport),
        count=mine.message,
        status=status,
        own=torch.cat([added.numbers.double(), numbers]),
    )
    lengths = [int(number) for number in received.own[: 2 * n]]
    state.slots.learn(lengths[:n], lengths[n:])
    if any(status & TOO_SHORT for status in received.statuses):
        state.slots.widen()
    if listed is not None:
        selection = listed.settled(received.own[2 * n :])
    num_sums = received.num_sums
    known = None if any(received.statuses) else Padded(first_of(added.sums.entries, num_sums), num_sums)
    return Tried(selection, first_of(mine.entries, selection.indices.numel()), known, received.found)


def _entries(acc: Tensor, selection: Selection) -> tuple[Padded, Tensor]:
    """Return this rank's entries, and the numbers (m,) float64 by which the choice is read."""
    indices, listed = selection.indices, selection.unread
    entries = SparseValues(indices, acc.index_select(0, indices))
    if listed is None:
        return Padded(entries, indices.numel()), on_device([], torch.float64, acc.device)
    numbers = listed.numbers()
    is_there = torch.arange(indices.numel(), device=acc.device) < numbers[0]
    masked = SparseValues(indices.where(is_there, BEYOND), entries.values.where(is_there, 0.0))
    return Padded(masked, numbers[0]), numbers
