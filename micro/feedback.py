"""What happens to the part of a gradient that was not sent."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from micro import kernels
from micro.kernels.reference import is_ordinary, too_large
from micro.kernels.sums import Sums
from micro.parts import Part
from micro.values.finite import FirstBad
from micro.values.norms import norm
from micro.values.sparse import SparseValues

Memory = dict[str, Tensor]  # vectors (numel,) by name, or empty; "residual" is always there


class Feedback(Part, ABC):
    """A rule for what was not sent. What it keeps is owned by the reducer's state and changed in place."""

    kind: ClassVar[str] = "feedback"
    home: ClassVar[str] = "micro.feedback"
    group: ClassVar[str] = "micro.feedback"

    @abstractmethod
    def start(self, numel: int, dtype: torch.dtype, device: torch.device) -> Memory:
        """Return what is kept before the first step: vectors with one entry per parameter, the residual among them."""

    def forgotten(self, memory: Memory) -> Tensor | None:
        """Return the L2 norm of what the next accumulate_ takes off what was kept, or None where nothing ever is."""
        return None

    @abstractmethod
    def accumulate_(self, memory: Memory, grad: Tensor, *, world_size: int) -> tuple[Tensor, FirstBad]:
        """Return the accumulator of a step: the gradient plus what was kept.

        Args:
            memory: what was kept; its residual may become the accumulator.
            grad: (numel,) may become the accumulator, or zero.
        Returns:
            acc (numel,), finite also where ranks are added up; the index of the first NaN, Inf or number so large that
            sums would overflow, which was left out; or None. On an accelerator the index is there, not on the host.
        """

    def accumulate_and_sum_(self, memory: Memory, grad: Tensor, *, world_size: int) -> tuple[Tensor, FirstBad, Sums]:
        """Return what `accumulate_` does, and the sums of the accumulator, in the same pass where that can be."""
        acc, first_bad = self.accumulate_(memory, grad, world_size=world_size)
        return acc, first_bad, kernels.sums_of(acc)

    def without_grad_(self, memory: Memory) -> Tensor | None:
        """Return the accumulator (numel,) of a step but for the gradient, which the caller adds as `absorb_` does.

        In place of accumulate_, for a pass over the accumulator that can add on its way; None where accumulate_ does
        more than add.
        """
        return None

    def clear_(self, grad: Tensor) -> None:
        """Make ``grad`` (numel,) zero, once the accumulator, which may be its memory, is not needed any more."""

    @abstractmethod
    def settle_(self, memory: Memory, sent: SparseValues, update: Sequence[SparseValues], scale: float) -> None:
        """Keep what was not sent: the accumulator less ``sent``.

        Called where the step counts; else the accumulator is kept as it is.

        Args:
            memory: since accumulate_ it has the accumulator.
            sent: by this rank.
            update: by all ranks; ``scale`` times the sum of these parts is the mean.
        """

    def keep_(self, memory: Memory, unsent: SparseValues) -> None:
        """Keep ``unsent`` too, after settle_: what the mean update lost when it was rounded to the gradient's dtype.

        Every rank keeps the same, so that the sum over ranks is world_size times what the update lacks. Where nothing
        is kept of an element, it is lost.
        """
        if memory["residual"].numel():
            unsent.add_to_(memory["residual"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFeedback(Feedback):
    """Keep what was not sent and add it to the next gradient: ``residual = acc - sent``, ``acc = residual + grad``.

    The residual is of single precision at least. Of half-precision gradients it also keeps what the mean loses on being
    rounded to their dtype.

    The learning rate stays outside: residuals are in units of gradients, and what was kept before a change of the
    learning rate is applied at the new one.

    Args:
        decay: factor on the residual at each step, in (0, 1]. Below 1 what waits for long is forgotten; statistics say
            how much at each step (``forgotten``), for which the residual is read once more.

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
        """Return the norm () of the share of the residual that the decay takes."""
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
        """Add the gradient to the residual in place, and the sums up in the same pass."""
        acc = self.without_grad_(memory)
        return acc, *kernels.absorb_and_sum_(acc, grad)

    def settle_(self, memory: Memory, sent: SparseValues, update: Sequence[SparseValues], scale: float) -> None:
        """Take what was sent out of the accumulator, which is the residual."""
        sent.take_from_(memory["residual"])


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFeedback(Feedback):
    """Drop what was not sent. Unbiased estimators want this; any other method loses mass with it."""

    name: ClassVar[str] = "none"

    def start(self, numel: int, dtype: torch.dtype, device: torch.device) -> Memory:
        """Return an empty tensor: nothing is kept."""
        return _zeros({"residual": 0}, dtype, device)

    def accumulate_(self, memory: Memory, grad: Tensor, *, world_size: int) -> tuple[Tensor, FirstBad]:
        """Return the gradient itself, in single precision at least."""
        acc = grad.to(memory["residual"].dtype)
        return acc, _drop_too_large_(acc)

    def clear_(self, grad: Tensor) -> None:
        """Forget the accumulator, which may be the gradient."""
        grad.zero_()

    def settle_(self, memory: Memory, sent: SparseValues, update: Sequence[SparseValues], scale: float) -> None:
        """Keep nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumCorrection(Feedback):
    """Accumulate momentum instead of gradients: ``u = momentum * u + g``, ``acc = v + u``, ``v = acc - sent``.

    What is sent is then a sum of momentum steps, as it would have been without delay, and the optimizer must have no
    momentum of its own. Where something was sent, u is set to zero (factor masking), so that momentum does not go
    on in an old direction.

    Args:
        momentum: in [0, 1).
        nesterov: ``u = momentum * (u + g)``, ``acc = v + u + g``, as the public code has it.
        clip: scale each rank's gradient down to a norm of ``clip / sqrt(world_size)`` before it is accumulated; None
            leaves it. Independent gradients of that norm add up to one of norm ``clip``.

    Source: Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887, section 3, and its public code.
    Differences: the norm is a bucket's, neither the whole gradient's nor, as in the code, a tensor's; every
    parameter is sparsified (the code reduces those of one dimension dense, and gives them momentum after it); weight
    decay belongs to the optimizer, which adds it after the exchange (the code does the same, with a separate momentum).

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
        """Add the gradient to the momentum, and that to the residual, in place; return the residual."""
        residual, momentum = memory["residual"], memory["momentum"]
        wide = grad.to(residual.dtype)  # what is too large is so for the residual: float16 ends before that
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
        """Take what was sent out of the accumulator, and the momentum out of those places altogether."""
        sent.take_from_(memory["residual"])
        sent.clear_in_(memory["momentum"])


def _zeros(sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> Memory:
    wide = torch.promote_types(dtype, torch.float32)
    return {name: torch.zeros(size, dtype=wide, device=device) for name, size in sizes.items()}


def _is_ordinary(vector: Tensor) -> bool:
    """Tell whether nothing in ``vector`` is too large; on an accelerator the host does not wait to know."""
    return vector.device.type == "cpu" and is_ordinary(vector, vector.dtype)


def _drop_too_large_(vector: Tensor) -> FirstBad:
    """Set what is not finite, or counts as infinite, to zero; return the index of the first."""
    if _is_ordinary(vector):
        return None
    is_bad = too_large(vector)
    vector.masked_fill_(is_bad, 0.0)
    if vector.device.type != "cpu":
        places = torch.arange(vector.numel() + 1, dtype=torch.int32, device=vector.device)
        return torch.cat([places[:-1].where(is_bad, vector.numel()), places[-1:]]).amin(0, keepdim=True)
    bad = torch.nonzero(is_bad).view(-1)
    return int(bad[0]) if bad.numel() else None


def _first_of(*indices: FirstBad) -> FirstBad:
    late = [index for index in indices if isinstance(index, Tensor)]
    if late:
        return torch.cat(late).amin(0, keepdim=True)
    return min((index for index in indices if isinstance(index, int)), default=None)
