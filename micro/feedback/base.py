"""The base class of feedbacks: what happens to the part of a gradient that was not sent."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.kernels.sums import Sums
from micro.parts import Part
from micro.values.finite import FirstBad
from micro.values.sparse import SparseValues

Memory = dict[str, Tensor]  # vectors (numel,) by name, or empty; "residual" is always there


class Feedback(Part, ABC):
    """A rule for what was not sent. Its memory is owned by the reducer's state and changed in place."""

    kind: ClassVar[str] = "feedback"
    home: ClassVar[str] = "micro.feedback"
    group: ClassVar[str] = "micro.feedback"

    @abstractmethod
    def start(self, numel: int, dtype: torch.dtype, device: torch.device) -> Memory:
        """Return the memory before the first step: vectors (numel,) by name, including "residual"."""

    def forgotten(self, memory: Memory) -> Tensor | None:
        """Return the L2 norm of what the next accumulate_ removes by decay; None without a decay."""
        return None

    @abstractmethod
    def accumulate_(self, memory: Memory, grad: Tensor, *, world_size: int) -> tuple[Tensor, FirstBad]:
        """Return the accumulator of a step: the gradient plus the residual.

        Args:
            memory: its residual may become the accumulator.
            grad: (numel,) may become the accumulator, or zero.
        Returns:
            acc (numel,), finite, also when summed over ranks. Then the index of the first element that was left out
            because it is NaN, Inf or large enough to overflow a sum, or None; on an accelerator the index is a tensor.
        """

    def accumulate_and_sum_(self, memory: Memory, grad: Tensor, *, world_size: int) -> tuple[Tensor, FirstBad, Sums]:
        """Return what `accumulate_` returns, and the accumulator's sums, in one pass if possible."""
        acc, first_bad = self.accumulate_(memory, grad, world_size=world_size)
        return acc, first_bad, kernels.sums_of(acc)

    def without_grad_(self, memory: Memory) -> Tensor | None:
        """Return the accumulator (numel,) before the gradient is added, or None if accumulate_ does more than add.

        A caller that passes over the accumulator anyway uses it in place of accumulate_, and adds the gradient in that
        pass, as `absorb_` does.
        """
        return None

    def clear_(self, grad: Tensor) -> None:
        """Set ``grad`` (numel,) to zero. The accumulator may share its memory and must no longer be needed."""

    @abstractmethod
    def settle_(self, memory: Memory, sent: SparseValues, update: Sequence[SparseValues], scale: float) -> None:
        """Keep what was not sent: the accumulator minus ``sent``.

        Called if the step counts; otherwise the whole accumulator is kept.

        Args:
            memory: holds the accumulator since accumulate_.
            sent: by this rank.
            update: by all ranks; ``scale`` times the sum of these parts is the mean.
        """


def zeros(sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> Memory:
    """Return a memory of zeros with vectors of these lengths, in single precision at least."""
    wide = torch.promote_types(dtype, torch.float32)
    return {name: torch.zeros(size, dtype=wide, device=device) for name, size in sizes.items()}
