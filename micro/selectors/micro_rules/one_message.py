"""Candidates that travel together with their counts: one message of a capacity that all ranks know beforehand."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from micro.kernels.cuts import kept_by_all, message, surely_kept
from micro.selectors.micro_rules.base import Search

MORE, LESS = 0.5, 3.0  # roots: a count x differs from step to step by about sqrt(2 x) by chance; the most varies less


@dataclass(frozen=True, slots=True)
class Room:
    """How many candidates a message holds, from what each slice gave in the last step.

    A message has a rank's candidates in an order such that what it turns out to keep comes first: at first those of the
    highest bins, ascending, which ``sure`` says are kept in any case; then the others from the largest to the smallest
    magnitude, the lowest index first among equals. A candidate is its place in the slice, in as many bytes as a slice
    needs.

    Attributes:
        capacity: candidates in every rank's message.
        width: bytes of a candidate.
        sure: (world_size,) float64: the candidates of the highest bins count as kept while they are no more than this.
    """

    capacity: int
    width: int
    sure: Tensor

    @classmethod
    def after(cls, last: Sequence[int], k: int, slack: float, longest: int) -> "Room | None":
        """Return the room for a step that is to keep k, the same on all ranks; None where nothing is known.

        Args:
            last: what each rank kept in the last step. A slice is searched by the rank before in the next.
            slack: share of what is expected by which it may be more or less.
            longest: most elements of a slice.
        """
        total = sum(last)
        if not total or len(last) == 1:
            return None
        sure = surely_kept(last, k / total, 1 - slack, LESS)
        return cls(room_for(max(last) * (k / total), slack, longest), width_for(longest), sure)

    def message(self, found: tuple[Tensor, Tensor, Tensor], search: Search, *, lowest: int, shift: int) -> Tensor:
        """Return a rank's row: its counts, then its candidates in their order, filled up with zeros; all int32.

        Args:
            found: what `micro.kernels.collect` returned for the bins that ``lowest`` and ``shift`` describe.
        """
        sure = float(self.sure[search.comm.rank])  # in the host's memory
        places = {"start": search.start, "lowest": lowest, "shift": shift}
        return message(found, **places, sure=sure, capacity=self.capacity, width=self.width)

    def kept(self, rows: Tensor, counts: Tensor, taken: tuple[int, ...], search: Search) -> Tensor | None:
        """Return what all ranks keep, in rank order, each rank's as in its message: (sum(taken),) int32.

        None, on all ranks alike, where a rank keeps more than its message holds, or less than counted as sure.

        Args:
            rows: (world_size, length) int32, every rank's message.
            counts: (world_size, NUM_BINS) int32, the first of each, in the host's memory.
            taken: how many each rank keeps.
        """
        starts = [start for start, _ in search.spans]
        return kept_by_all(rows, counts, self.sure, taken, starts, capacity=self.capacity, width=self.width)


def room_for(expected: float, slack: float, longest: int) -> int:
    """Return the capacity where the rank that keeps most is expected to keep so many."""
    return min(math.ceil((1 + slack) * expected + MORE * math.sqrt(expected)), longest)


def width_for(longest: int) -> int:
    """Return the bytes of a place in a slice of ``longest`` elements."""
    return max(-(-(longest - 1).bit_length() // 8), 1)


def message_bytes(capacity: int, longest: int) -> int:
    """Return the bytes of the candidates in a message; messages are of whole int32."""
    return -(-capacity * width_for(longest) // 4) * 4


def candidate_bytes(expected: float, slack: float, longest: int, world_size: int) -> int:
    """Return the bytes of the candidates in a message of a step in steady state.

    Args:
        expected: kept by a rank; slices differ by chance alone: the most is about sqrt(2 x ln n) more.
        longest: elements of the longest slice.
    """
    most = expected + math.sqrt(2 * expected * math.log(world_size))
    return message_bytes(room_for(most, slack, longest), longest)
