"""Factors of a vector's pieces, which are compared as if each were multiplied by its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scales:
    """A factor for each of neighbouring pieces of a vector, in place of a multiplied copy of it.

    Attributes:
        edges: (S + 1,) int64 on the CPU, where pieces begin and the last one ends: the vector's length.
        factors: (S,) float64, positive, on the vector's device; each is rounded to the vector's dtype.
    """

    edges: Tensor
    factors: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], factors: Tensor) -> "Scales":
        """Return the factors (S,) of neighbouring pieces of these lengths."""
        return cls(_edges(tuple(lengths)), factors)

    def part(self, start: int, stop: int) -> "Scales":
        """Return the factors of a part of the vector; of pieces outside of it nothing is left."""
        return Scales((self.edges - start).clamp_(0, stop - start), self.factors)

    def multiplied(self, vector: Tensor) -> Tensor:
        """Return a copy of ``vector`` (numel,), each piece times its factor; no read on a device.

        There each element gets its factor from a vector of them: a call for each piece would be slower for many.
        """
        lengths = self.edges.diff()
        if vector.device.type != "cpu":
            repeats = lengths.to(vector.device, non_blocking=True)
            return vector * self.factors.to(vector.dtype).repeat_interleave(repeats, output_size=vector.numel())
        product, sizes = torch.empty_like(vector), lengths.tolist()
        for piece, factor, out in zip(vector.split(sizes), self.factors.tolist(), product.split(sizes), strict=True):
            torch.mul(piece, factor, out=out)
        return product


@lru_cache(maxsize=64)  # called at every step
def _edges(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int64)
