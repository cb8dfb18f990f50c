"""What becomes of the part of a gradient that was not sent."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.kernels.reference import first_nonfinite
from micro.parts import Part
from micro.sparse import SparseValues

Memory = dict[str, Tensor]  # vectors (numel,) by name, or empty; "residual" is always there


class Feedback(Part, ABC):
    """A rule for what was not sent. What it keeps is owned by the reducer's state and changed in place."""

    kind: ClassVar[str] = "feedback"
    home: ClassVar[str] = "micro.feedback"

    @abstractmethod
    def start(self, numel: int, dtype: torch.dtype, device: torch.device) -> Memory:
        """Return what is kept before the first step: vectors with one entry per parameter, the residual among them."""

    @abstractmethod
    def accumulate_(self, memory: Memory, grad: Tensor, *, world_size: int) -> tuple[Tensor, int | None]:
        """Make the accumulator of a step: the gradient and what was kept for it.

        Args:
            memory: what was kept; its residual may become the accumulator.
            grad: (numel,) may become the accumulator, or zero.
        Returns:
            acc (numel,), finite; the index of the first NaN or Inf of the gradient, which was left out, or None.
        """

    @abstractmethod
    def settle_(self, memory: Memory, acc: Tensor, grad: Tensor, sent: SparseValues | None) -> None:
        """Keep ``acc - sent`` (all of acc where nothing was sent), and leave ``grad`` zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFeedback(Feedback):
    """Keep what was not sent and add it to the next gradient: ``residual = acc - sent``.

    The learning rate stays outside: residuals are in units of gradients, and what was kept before a change of the
    learning rate is applied at the new one.

    Source: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, arXiv 1901.09847.
    """

    name: ClassVar[str] = "residual"

    def start(self, numel: int, dtype: torch.dtype, device: torch.device) -> Memory:
        """Return zeros, in single precision at least."""
        return {"residual": torch.zeros(numel, dtype=torch.promote_types(dtype, torch.float32), device=device)}

    def accumulate_(self, memory: Memory, grad: Tensor, *, world_size: int) -> tuple[Tensor, int | None]:
        """Add the gradient to the residual in place and return it: one pass, no second vector."""
        return memory["residual"], kernels.absorb_(memory["residual"], grad)

    def settle_(self, memory: Memory, acc: Tensor, grad: Tensor, sent: SparseValues | None) -> None:
        """Take what was sent out of the accumulator, which is the residual; the gradient is zero already."""
        if sent is not None:
            sent.add_to_(acc, alpha=-1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFeedback(Feedback):
    """Drop what was not sent. Unbiased estimators want this; any other method loses mass with it."""

    name: ClassVar[str] = "none"

    def start(self, numel: int, dtype: torch.dtype, device: torch.device) -> Memory:
        """Return an empty tensor: nothing is kept."""
        return {"residual": torch.zeros(0, dtype=torch.promote_types(dtype, torch.float32), device=device)}

    def accumulate_(self, memory: Memory, grad: Tensor, *, world_size: int) -> tuple[Tensor, int | None]:
        """Return the gradient itself, in single precision at least."""
        first_bad = first_nonfinite(grad)
        if first_bad is not None:
            grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return grad.to(memory["residual"].dtype), first_bad

    def settle_(self, memory: Memory, acc: Tensor, grad: Tensor, sent: SparseValues | None) -> None:
        """Forget the accumulator, which may be the gradient."""
        grad.zero_()
