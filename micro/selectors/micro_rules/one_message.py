"""Candidates that travel together with their counts: one message of a capacity that all ranks know beforehand."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MORE, LESS = 0.5, 3.0  # roots: a count x differs from step to step by about sqrt(2 x) by chance; the most varies less


@dataclass(frozen=True, slots=True)
class Room:
    """How many candidates a message holds, from what each slice gave in the last step.

    A message has a rank's candidates in an order such that what it turns out to keep comes first: at first those of the
    highest bins, ascending, which ``sure`` says are kept in any case; then the others from the largest to the smallest
    magnitude, the lowest index first among equals.

    Attributes:
        capacity: candidates in every rank's message.
        sure: (world_size,) float64: the candidates of the highest bins count as kept while they are no more than this.
    """

    capacity: int
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
        expected = torch.tensor([*last[1:], last[0]], dtype=torch.float64) * (k / total)
        sure = (1 - slack) * expected - LESS * expected.sqrt()
        return cls(room_for(float(expected.max()), slack, longest), sure)

    def message(self, counts: Tensor, bins: Tensor, magnitudes: Tensor, places: Tensor, rank: int) -> Tensor:
        """Return a rank's row: its counts, then its candidates in their order, filled up with zeros; all int32.

        Args:
            counts: (b,) int32, of the rank's candidates by bin.
            bins, magnitudes, places: (m,) of each candidate in ascending order; places int32.
        """
        reached = _reached(counts)
        lowest_sure = (reached > self.sure[rank]).sum()
        lowest = (reached >= self.capacity).sum() - 1  # below the capacity is full
        sure = torch.nonzero(bins >= lowest_sure).view(-1)
        others = torch.nonzero((bins < lowest_sure) & (bins >= lowest)).view(-1)
        order = torch.argsort(magnitudes.index_select(0, others), descending=True, stable=True)
        chosen = torch.cat([sure, others.index_select(0, order)])[: self.capacity]
        row = counts.new_zeros(counts.numel() + self.capacity)
        row[: counts.numel()] = counts
        row[counts.numel() : counts.numel() + chosen.numel()] = places.index_select(0, chosen)
        return row

    def kept(self, candidates: Tensor, counts: Tensor, taken: Sequence[int]) -> Tensor | None:
        """Return what all ranks keep, in rank order, each rank's as in its message: (sum(taken),) int32.

        None, on all ranks alike, where a rank keeps more than its message holds, or less than counted as sure.

        Args:
            candidates: (world_size, capacity) int32 from the messages.
            counts: (world_size, b) from the messages, in the host's memory.
            taken: how many each rank keeps.
        """
        keeps, reached = torch.tensor(taken), _reached(counts)
        sure = torch.where(reached <= self.sure.view(-1, 1), reached, 0).amax(1)
        if not bool(((sure <= keeps) & (keeps <= self.capacity)).all()):
            return None
        place = torch.arange(self.capacity, device=candidates.device)
        return candidates[place < keeps.to(candidates.device).view(-1, 1)]


def room_for(expected: float, slack: float, longest: int) -> int:
    """Return the capacity where the rank that keeps most is expected to keep so many."""
    return min(math.ceil((1 + slack) * expected + MORE * math.sqrt(expected)), longest)


def _reached(counts: Tensor) -> Tensor:
    """Return how many candidates are in each bin and above (..., b) int64."""
    return counts.flip(-1).cumsum(-1).flip(-1)
