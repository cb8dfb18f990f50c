"""What becomes of the part of a gradient that was not sent."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from micro.sparse import SparseValues


class Feedback(ABC):
    """A rule for what was not sent. The residual is owned by the reducer's state and changed in place."""

    name: ClassVar[str]

    @abstractmethod
    def start(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the residual before the first step."""

    @abstractmethod
    def accumulate(self, residual: Tensor, grad: Tensor) -> Tensor:
        """Return acc (numel,), the gradient and what was kept for it; may share memory with either."""

    @abstractmethod
    def hold(self, residual: Tensor, grad: Tensor) -> Tensor:
        """Return acc for a rank whose gradient cannot be used: what was kept, without the gradient."""

    @abstractmethod
    def settle_(self, acc: Tensor, sent: SparseValues) -> None:
        """Keep ``acc - sent``."""


class ErrorFeedback(Feedback):
    """Keep what was not sent and add it to the next gradient: ``residual = acc - sent``.

    The learning rate stays outside: residuals are in units of gradients, and what was kept before a change of the
    learning rate is applied at the new one.

    Source: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, arXiv 1901.09847.
    """

    name = "residual"

    def start(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros, in single precision at least."""
        return torch.zeros(numel, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def accumulate(self, residual: Tensor, grad: Tensor) -> Tensor:
        """Add the gradient to the residual in place and return it: one pass, no second vector."""
        return residual.add_(grad)

    def hold(self, residual: Tensor, grad: Tensor) -> Tensor:
        """Return the residual as it is."""
        return residual

    def settle_(self, acc: Tensor, sent: SparseValues) -> None:
        """Take what was sent out of the accumulator, which is the residual."""
        sent.add_to_(acc, alpha=-1.0)


class NoFeedback(Feedback):
    """Drop what was not sent. Unbiased estimators want this; any other method loses mass with it."""

    name = "none"

    def start(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty tensor: nothing is kept."""
        return torch.zeros(0, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def accumulate(self, residual: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient itself, in single precision at least."""
        return grad.to(residual.dtype)

    def hold(self, residual: Tensor, grad: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(grad, dtype=residual.dtype)

    def settle_(self, acc: Tensor, sent: SparseValues) -> None:
        """Do nothing: the accumulator is gone after the step."""


FEEDBACKS: dict[str, type[Feedback]] = {feedback.name: feedback for feedback in (ErrorFeedback, NoFeedback)}
