"""A vector that is dealt out in blocks, so that each part has some of every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from micro.on_device import on_device
from micro.partition import cyclic


@dataclass(frozen=True, slots=True)
class DealtBlocks:
    """A vector of which part p of n has the blocks p, p + n, p + 2 n and so on; the last block may be short.

    Parts one after the other are the *dealt* vector: as long, in another order, and each part is a range of it.

    Attributes:
        numel: of the vector.
        num_parts: n.
        block: elements of a block.
    """

    numel: int
    num_parts: int
    block: int

    def spans(self, step: int) -> tuple[tuple[int, int], ...]:
        """Return the (start, stop) in the dealt vector of each rank's part at ``step``, in rank order."""
        starts = [self._start(part) for part in range(self.num_parts + 1)]
        return cyclic(tuple(pairwise(starts)), step)

    def slice(self, vector: Tensor, step: int, rank: int) -> Tensor:
        """Return a copy of a rank's part (m,) of ``vector`` (numel,)."""
        part = (step + rank) % self.num_parts
        whole = self._rounds * self.num_parts * self.block
        first, rest = whole + part * self.block, self._rest(part)
        copied = vector.new_empty(self._rounds * self.block + rest)
        blocks, last = copied.split([self._rounds * self.block, rest])
        dealt = vector[:whole].view(self._rounds, self.num_parts, self.block)
        blocks.view(self._rounds, self.block).copy_(dealt[:, part])
        last.copy_(vector[first : first + rest])
        return copied

    def places(self, dealt: Tensor, step: int, rank: int) -> Tensor:
        """Return where in the vector elements (k,) of a rank's part are that have these places in the dealt vector."""
        part = (step + rank) % self.num_parts
        return self._places(dealt - self._start(part), part)

    def places_of_all(self, dealt: Tensor, counts: Sequence[int], step: int) -> Tensor:
        """Return the same for elements of all ranks' parts (sum(counts),), in rank order."""
        parts = [(step + rank) % self.num_parts for rank in range(self.num_parts)]
        numbers = [*parts, *(self._start(part) for part in parts), *counts]
        part, start, each = on_device(numbers, dealt.dtype, dealt.device).view(3, -1)
        part, start = torch.stack([part, start]).repeat_interleave(each, dim=1, output_size=dealt.numel())
        return self._places(dealt - start, part)

    @property
    def longest(self) -> int:
        """The most elements that a part has."""
        return self._rounds * self.block + self._rest(0)

    @property
    def _rounds(self) -> int:
        """How many whole blocks every part has."""
        return self.numel // (self.num_parts * self.block)

    def _rest(self, part: int) -> int:
        """Return how many elements a part has beyond these."""
        left = self.numel - self._rounds * self.num_parts * self.block
        return min(max(left - part * self.block, 0), self.block)

    def _start(self, part: int) -> int:
        """Return where a part begins in the dealt vector; that of ``num_parts`` is its end."""
        left = self.numel - self._rounds * self.num_parts * self.block
        return part * self._rounds * self.block + min(part * self.block, left)

    def _places(self, within: Tensor, part: "Tensor | int") -> Tensor:
        """Return where in the vector the elements are that have these places within a part."""
        return within + (within // self.block * (self.num_parts - 1) + part) * self.block
