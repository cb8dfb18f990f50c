"""The feedback residual: what was not sent is added to the next gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.feedback.base import Feedback, Memory, zeros
from micro.kernels.sums import Sums
from micro.values.finite import FirstBad
from micro.values.norms import norm
from micro.values.sparse import SparseValues


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFeedback(Feedback):
    """Keep what was not sent and add it to the next gradient: ``residual = acc - sent``, ``acc = residual + grad``.

    The residual has at least single precision. For half-precision gradients it also keeps the rounding error of the
    mean.

    Residuals are in units of gradients, without the learning rate: after a change of the learning rate, old residuals
    are applied at the new one.

    Args:
        decay: factor on the residual at each step, in (0, 1]. Below 1, old residuals fade; the statistic ``forgotten``
            is the norm removed at each step and costs one more read of the residual.

    Source: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, arXiv 1901.09847. With a decay of 0.95:
    Sarfi et al., SparseLoCo, 2025, arXiv 2508.15706; of 0.999: Peng et al., DeMo, 2024, arXiv 2411.19870.

    Raises:
        ValueError: decay outside of (0, 1].
    """

    decay: float = 1.0
    name: ClassVar[str] = "residual"

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay of the feedback must be in (0, 1], got {self.decay}")

    def forgotten(self, memory: Memory) -> Tensor | None:
        """Return the norm () of the part of the residual that the decay removes."""
        return None if self.decay == 1 else (1 - self.decay) * norm(memory["residual"], dtype=torch.float64)

    def start(self, numel: int, dtype: torch.dtype, device: torch.device) -> Memory:
        """Return zeros, in single precision at least."""
        return zeros({"residual": numel}, dtype, device)

    def accumulate_(self, memory: Memory, grad: Tensor, *, world_size: int) -> tuple[Tensor, FirstBad]:
        """Add the gradient to the residual, after its decay, in place and return it: one pass, no second vector."""
        acc = self.without_grad_(memory)
        return acc, kernels.absorb_(acc, grad)

    def without_grad_(self, memory: Memory) -> Tensor:
        """Return the residual, after its decay."""
        if self.decay != 1:
            memory["residual"].mul_(self.decay)
        return memory["residual"]

    def accumulate_and_sum_(self, memory: Memory, grad: Tensor, *, world_size: int) -> tuple[Tensor, FirstBad, Sums]:
        """Add the gradient to the residual in place, and compute the sums in the same pass."""
        acc = self.without_grad_(memory)
        return acc, *kernels.absorb_and_sum_(acc, grad)

    def settle_(self, memory: Memory, sent: SparseValues, update: Sequence[SparseValues], scale: float) -> None:
        """Subtract what was sent from the accumulator, which becomes the residual."""
        sent.take_from_(memory["residual"])
