"""Error feedback: what happens to the part of a gradient that was not sent."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.kernels.reference import first_bad_of, fitting, is_ordinary
from micro.kernels.sums import Sums
from micro.parts import Part
from micro.values.finite import FirstBad
from micro.values.norms import norm
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
        return _zeros({"residual": numel}, dtype, device)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFeedback(Feedback):
    """Drop what was not sent. Use it with unbiased estimators; biased methods lose gradient with it."""

    name: ClassVar[str] = "none"

    def start(self, numel: int, dtype: torch.dtype, device: torch.device) -> Memory:
        """Return an empty tensor: nothing is kept."""
        return _zeros({"residual": 0}, dtype, device)

    def accumulate_(self, memory: Memory, grad: Tensor, *, world_size: int) -> tuple[Tensor, FirstBad]:
        """Return the gradient itself, in single precision at least."""
        acc = grad.to(memory["residual"].dtype)
        return acc, _drop_too_large_(acc)

    def clear_(self, grad: Tensor) -> None:
        """Set the gradient to zero; it may be the accumulator."""
        grad.zero_()

    def settle_(self, memory: Memory, sent: SparseValues, update: Sequence[SparseValues], scale: float) -> None:
        """Keep nothing."""


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
        return _zeros({"residual": numel, "momentum": numel}, dtype, device)

    def accumulate_(self, memory: Memory, grad: Tensor, *, world_size: int) -> tuple[Tensor, FirstBad]:
        """Add the gradient to the momentum and the momentum to the residual, in place; return the residual."""
        residual, momentum = memory["residual"], memory["momentum"]
        wide = grad.to(residual.dtype)  # "too large" is judged in the residual's dtype: float16 overflows earlier
        ordinary = _is_ordinary(wide)
        first_bad = None if ordinary else _drop_too_large_(wide)
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
            first_bad = _first_of(first_bad, _drop_too_large_(momentum), _drop_too_large_(residual))
        return residual, first_bad

    def settle_(self, memory: Memory, sent: SparseValues, update: Sequence[SparseValues], scale: float) -> None:
        """Subtract what was sent from the accumulator, and set the momentum to zero there."""
        sent.take_from_(memory["residual"])
        sent.clear_in_(memory["momentum"])


def _zeros(sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> Memory:
    wide = torch.promote_types(dtype, torch.float32)
    return {name: torch.zeros(size, dtype=wide, device=device) for name, size in sizes.items()}


def _is_ordinary(vector: Tensor) -> bool:
    """Return whether nothing in ``vector`` is too large; on an accelerator without waiting for the device."""
    return vector.device.type == "cpu" and is_ordinary(vector, vector.dtype)


def _drop_too_large_(vector: Tensor) -> FirstBad:
    """Set elements that are not finite or too large to zero; return the index of the first."""
    if _is_ordinary(vector):
        return None
    fits = fitting(vector)
    vector.masked_fill_(~fits, 0.0)
    return first_bad_of(fits)


def _first_of(*indices: FirstBad) -> FirstBad:
    late = [index for index in indices if isinstance(index, Tensor)]
    if late:
        return torch.cat(late).amin(0, keepdim=True)
    return min((index for index in indices if isinstance(index, int)), default=None)
