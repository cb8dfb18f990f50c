"""Scales of a vector for comparisons of scaled magnitudes, without a divided copy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from micro.kernels.reference import limit


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
