"""The feedback momentum: momentum of gradients is accumulated, and what was not sent of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.feedback.base import Feedback, Memory, zeros
from micro.feedback.none import drop_too_large_, is_ordinary_here
from micro.values.finite import FirstBad
from micro.values.sparse import SparseValues


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumCorrection(Feedback):
    """Accumulate momentum instead of gradients: ``u = momentum * u + g``, ``acc = v + u``, ``v = acc - sent``.

    The ranks then send sums of momentum steps, so use an optimizer without momentum. Where something was sent, u is set
    to zero (factor masking): otherwise momentum would continue in an old direction.

    Args:
        momentum: in [0, 1).
        nesterov: ``u = momentum * (u + g)``, ``acc = v + u + g``, as the public code has it.
        clip: scale each rank's gradient down to a norm of ``clip / sqrt(world_size)`` before it is accumulated: the sum
            of independent gradients of that norm has norm ``clip``. None: no clipping.

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887, section 3, and its public code.
    Differences: the norm is taken per bucket (paper: the whole gradient; code: each tensor); every parameter is
    sparsified (the code reduces one-dimensional ones densely, then applies momentum); weight decay is the optimizer's,
    added after the exchange (the code too, with a separate momentum).

    Raises:
        ValueError: momentum outside of [0, 1), or clip not positive.
    """

    momentum: float = 0.9
    nesterov: bool = False
    clip: float | None = None
    name: ClassVar[str] = "momentum"

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum of the feedback must be in [0, 1), got {self.momentum}")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"clip of the feedback must be positive, got {self.clip}")

    def start(self, numel: int, dtype: torch.dtype, device: torch.device) -> Memory:
        """Return zeros, in single precision at least: what was not sent, and the momentum."""
        return zeros({"residual": numel, "momentum": numel}, dtype, device)

    def accumulate_(self, memory: Memory, grad: Tensor, *, world_size: int) -> tuple[Tensor, FirstBad]:
        """Add the gradient to the momentum and the momentum to the residual, in place; return the residual."""
        residual, momentum = memory["residual"], memory["momentum"]
        wide = grad.to(residual.dtype)  # "too large" is judged in the residual's dtype: float16 overflows earlier
        ordinary = is_ordinary_here(wide)
        first_bad = None if ordinary else drop_too_large_(wide)
        if self.clip is not None:
            largest = self.clip / math.sqrt(world_size)
            size = float(torch.linalg.vector_norm(wide, dtype=torch.float64))  # host sync: most have nothing to scale
            if size > largest:
                wide.mul_(largest / size)
        if self.nesterov:
            residual.add_(wide)
            momentum.add_(wide).mul_(self.momentum)
        else:
            momentum.mul_(self.momentum).add_(wide)  # rounded twice, as the public code does
        residual.add_(momentum)
        grad.zero_()
        if not ordinary:
            first_bad = _first_of(first_bad, drop_too_large_(momentum), drop_too_large_(residual))
        return residual, first_bad

    def settle_(self, memory: Memory, sent: SparseValues, update: Sequence[SparseValues], scale: float) -> None:
        """Subtract what was sent from the accumulator, and set the momentum to zero there."""
        sent.take_from_(memory["residual"])
        sent.clear_in_(memory["momentum"])


def _first_of(*indices: FirstBad) -> FirstBad:
    late = [index for index in indices if isinstance(index, Tensor)]
    if late:
        return torch.cat(late).amin(0, keepdim=True)
    return min((index for index in indices if isinstance(index, int)), default=None)
