"""Scales of a vector, which is compared as if it were scaled, without a scaled copy: by piece, or by element."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from micro.kernels.reference import limit
from micro.on_device import to_device


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

    def scaled(self, vector: Tensor) -> Tensor:
        """Return a copy of ``vector`` (numel,), each piece times its factor; no read on a device.

        There each element gets its factor from a vector of them: a call for each piece would be slower for many.
        """
        lengths = self.edges.diff()
        if vector.device.type != "cpu":
            repeats = to_device(lengths, vector.device)
            return vector * self.factors.to(vector.dtype).repeat_interleave(repeats, output_size=vector.numel())
        product, sizes = torch.empty_like(vector), lengths.tolist()
        for piece, factor, out in zip(vector.split(sizes), self.factors.tolist(), product.split(sizes), strict=True):
            torch.mul(piece, factor, out=out)
        return product


@dataclass(frozen=True, slots=True)
class ElementScales:
    """A divisor ``factor * root + eps`` of each element of a vector, in place of a divided copy of it.

    Attributes:
        roots: (numel,) not negative, on the vector's device, at least as precise as the vector.
        factor: of all of them; both numbers are rounded to the dtype of the roots.
        eps: positive.
    """

    roots: Tensor
    factor: float
    eps: float

    def part(self, start: int, stop: int) -> "ElementScales":
        """Return the divisors of a part of the vector."""
        return ElementScales(self.roots[start:stop], self.factor, self.eps)

    def scaled(self, vector: Tensor) -> Tensor:
        """Return a copy of ``vector`` (numel,), divided; what would be too large for its dtype is cut."""
        quotients, most = self.roots.mul(self.factor).add_(self.eps), limit(vector.dtype)
        return torch.div(vector, quotients, out=quotients).clamp_(-most, most).to(vector.dtype)


AnyScales = Scales | ElementScales


@lru_cache(maxsize=64)  # called at every step
def _edges(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int64)
