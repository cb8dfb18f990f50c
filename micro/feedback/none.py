"""The feedback none: what was not sent is dropped."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro.feedback.base import Feedback, Memory, zeros
from micro.kernels.reference import first_bad_of, fitting, is_ordinary
from micro.values.finite import FirstBad
from micro.values.sparse import SparseValues


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFeedback(Feedback):
    """Drop what was not sent. Use it with unbiased estimators; biased methods lose gradient with it."""

    name: ClassVar[str] = "none"

    def start(self, numel: int, dtype: torch.dtype, device: torch.device) -> Memory:
        """Return an empty tensor: nothing is kept."""
        return zeros({"residual": 0}, dtype, device)

    def accumulate_(self, memory: Memory, grad: Tensor, *, world_size: int) -> tuple[Tensor, FirstBad]:
        """Return the gradient itself, in single precision at least."""
        acc = grad.to(memory["residual"].dtype)
        return acc, drop_too_large_(acc)

    def clear_(self, grad: Tensor) -> None:
        """Set the gradient to zero; it may be the accumulator."""
        grad.zero_()

    def settle_(self, memory: Memory, sent: SparseValues, update: Sequence[SparseValues], scale: float) -> None:
        """Keep nothing."""


def is_ordinary_here(vector: Tensor) -> bool:
    """Return whether nothing in ``vector`` is too large; on an accelerator without waiting for the device."""
    return vector.device.type == "cpu" and is_ordinary(vector, vector.dtype)


def drop_too_large_(vector: Tensor) -> FirstBad:
    """Set elements that are not finite or too large to zero; return the index of the first."""
    if is_ordinary_here(vector):
        return None
    fits = fitting(vector)
    vector.masked_fill_(~fits, 0.0)
    return first_bad_of(fits)
