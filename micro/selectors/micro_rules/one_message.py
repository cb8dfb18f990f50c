"""Candidates that travel together with their counts: one message of a capacity that all ranks know beforehand."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from micro.kernels.cuts import surely_kept

MORE, LESS = 0.5, 3.0  # roots: a count x differs from step to step by about sqrt(2 x) by chance; the most varies less


@dataclass(frozen=True, slots=True)
class Room:
    """How many candidates a message holds, from what each slice gave in the last step.

    A message has a rank's counts, then its candidates in an order such that what it turns out to keep comes first: at
    first those of the highest bins, ascending, which ``sure`` says are kept in any case; then the others from the
    largest to the smallest magnitude, the lowest index first among equals. A candidate is its place in the slice, in as
    many bytes as a slice needs.

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
        return cls(_capacity(max(last) * (k / total), slack, longest), width_for(longest), sure)


def width_for(longest: int) -> int:
    """Return the bytes of a place in a slice of ``longest`` elements."""
    return max(-(-(longest - 1).bit_length() // 8), 1)


def candidate_bytes(expected: float, slack: float, longest: int, world_size: int) -> int:
    """Return the bytes of the candidates in a message, in whole int32, where a rank keeps ``expected`` of a slice.

    Slices differ by chance alone: the most is about sqrt(2 x ln n) more.
    """
    most = expected + math.sqrt(2 * expected * math.log(world_size))
    return -(-_capacity(most, slack, longest) * width_for(longest) // 4) * 4


def _capacity(most: float, slack: float, longest: int) -> int:
    return min(math.ceil((1 + slack) * most + MORE * math.sqrt(most)), longest)
