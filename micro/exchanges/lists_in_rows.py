"""Lists of indices in rows of fixed length, and what any of them holds: an accelerator's host reads once."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from micro.comm import Comm
from micro.health import Finite, flag_of
from micro.on_device import on_device
from micro.parts import NoState
from micro.sparse import BEYOND, UNKNOWN, Listed, Selection, packed

HEAD = 2  # numbers ahead: the count, and bits of a status
FINITE, IN_ROW = 1, 2
ROOTS = 1.5  # of the longest list of the last step, of room beyond it: a count x differs by chance by about sqrt(2 x)
LEAST, MOST, LESS = 0.05, 1.6, 0.97  # share of room beyond that; doubled by a row that was too short, then falling
FULLEST = 1.5  # times what lists of exact lengths take: more is not sent for a read


@dataclass(slots=True)
class LastCounts(NoState):
    """How many indices each rank chose in the last step of an accelerator; the same on all ranks.

    Nothing of it is saved: the first step after a checkpoint is loaded sends lists of exact lengths.

    Attributes:
        counts: empty before the first step.
        share: of room in a row beyond the largest of them.
    """

    counts: tuple[int, ...] = ()
    share: float = LEAST

    def room(self, world_size: int) -> int | None:
        """Return how many indices a row holds; None where nothing is known, or rows would send too much."""
        if world_size == 1 or len(self.counts) != world_size:
            return None
        room = _length(max(self.counts), self.share)
        return room if 0 < room * world_size <= FULLEST * sum(self.counts) else None

    def learn(self, counts: tuple[int, ...], like: Tensor) -> None:
        """Remember the counts of a step in which values are on the device of ``like``."""
        if like.device.type != "cpu":
            self.counts, self.share = counts, max(LEAST, LESS * self.share)

    def widen(self) -> None:
        """Give more room from now on."""
        self.share = min(2 * self.share, MOST)


def _length(longest: int, share: float) -> int:
    return math.ceil((1 + share) * longest + ROOTS * math.sqrt(longest))


@dataclass(frozen=True, slots=True)
class Received:
    """What came in rows.

    Attributes:
        selection: of this rank, with the counts of all.
        distinct: (K,) int32, ascending, what any rank chose; None, on all ranks alike, where a row was too short.
    """

    selection: Selection
    distinct: Tensor | None


def in_rows(state: LastCounts, listed: Listed, numel: int, comm: Comm, *, is_finite: Finite) -> Received:
    """Send the choice to all ranks before its host has read it, and read it with theirs.

    Args:
        state: which has room for a row; see `LastCounts.room`.
        numel: of the vector.
    """
    room, numbers = state.room(comm.world_size), listed.numbers()
    assert room is not None, "as reads_late has found"
    rows = comm.gather_rows(_row(listed, numbers[0], room, is_finite), "indices")
    comm.traffic.move((comm.world_size - 1) * 4 * HEAD, "indices", "counts")
    merged, shared = comm.alike(lambda: _merged(rows, numel))
    numbers_read = torch.cat([shared, numbers]).tolist()  # host sync: list lengths, and what the choice learns
    heads, number = numbers_read[: shared.numel() - 1], int(numbers_read[shared.numel() - 1])
    selection = listed.settled(numbers_read[shared.numel() :])
    counts, statuses = heads[::HEAD], [int(status) for status in heads[1::HEAD]]
    if UNKNOWN in counts:
        counts = _counted(selection, comm)
    if max(counts) > room:
        state.widen()
    fit = all(status & IN_ROW for status in statuses)
    selection = replace(
        selection,
        counts=tuple(int(count) for count in counts),
        is_finite=all(status & FINITE for status in statuses),
        overfull=not fit,
    )
    return Received(selection, merged[:number] if fit else None)


def _row(listed: Listed, count: Tensor, room: int, is_finite: Finite) -> Tensor:
    """Return this rank's message, (HEAD + room,) int32."""
    indices = listed.indices[:room]
    is_in_row = listed.is_listed() & (count <= room)
    status = IN_ROW * is_in_row.view(1).to(torch.int32) + FINITE * flag_of(is_finite, torch.int32, indices.device)
    row = indices.new_zeros(HEAD + room)
    row[:HEAD] = torch.cat([count.view(1).to(torch.int32), status])
    row[HEAD : HEAD + indices.numel()] = indices
    return row


def _merged(rows: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return what any row holds, ascending, then `BEYOND`; and the heads of all, then how many that are, float64."""
    is_there = torch.arange(rows.shape[1] - HEAD, device=rows.device) < rows[:, :1]
    ordered = rows[:, HEAD:].where(is_there, BEYOND).view(-1).sort().values
    is_first = ordered < numel
    is_first[1:] &= ordered[1:] != ordered[:-1]
    indices, number = packed(ordered, is_first)
    return indices, torch.cat([rows[:, :HEAD].reshape(-1), number.view(1)]).double()


def _counted(selection: Selection, comm: Comm) -> list[float]:
    """Return the counts of all ranks, of which some had to choose once more."""
    mine = on_device([selection.indices.numel()], torch.int32, selection.indices.device)
    rows = comm.gather_rows(mine).view(-1)
    counts: list[float] = rows.tolist()  # host sync: list lengths
    return counts
