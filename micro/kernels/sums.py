"""Sums over a vector that thresholds are fitted to, in one read, or in the pass that adds the gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from micro import kernels
from micro.health import FirstBad
from micro.norms import norms_of

CHUNK = 1 << 18  # elements that the form in plain torch adds up at a time on a CPU: they stay in the cache


@dataclass(frozen=True, slots=True)
class Sums:
    """Numbers on the host, in double precision; some 1e-6 of each is rounding.

    Attributes:
        count: of what is summed up.
        total: its sum.
        squares: sum of its squares.
        magnitudes: sum of its magnitudes.
        largest, smallest: of its magnitudes; 0 and infinity where there are none.
    """

    count: float
    total: float
    squares: float
    magnitudes: float
    largest: float
    smallest: float

    @property
    def mean(self) -> float:
        """The mean; count is at least 1."""
        return self.total / self.count

    @property
    def mean_magnitude(self) -> float:
        """The mean magnitude; count is at least 1."""
        return self.magnitudes / self.count

    @property
    def variance(self) -> float:
        """The unbiased variance; count is at least 2."""
        return max(self.squares - self.total * self.mean, 0.0) / (self.count - 1)

    @property
    def variance_of_magnitudes(self) -> float:
        """The unbiased variance of the magnitudes; count is at least 2."""
        return max(self.squares - self.magnitudes * self.mean_magnitude, 0.0) / (self.count - 1)


def sums_of(x: Tensor) -> Sums:
    """Return the sums of ``x`` (numel,)."""
    return sums_above(x, -1.0)


def sums_above(x: Tensor, floor: float) -> Sums:
    """Return the sums of those of ``x`` (numel,) whose magnitude is larger than ``floor``, rounded to its dtype."""
    loops = _loops_for(x)
    return Sums(*(loops.sums(x, floor) if loops else in_torch(x, floor)))


def absorb_and_sum_(residual: Tensor, grad: Tensor) -> tuple[FirstBad, Sums]:
    """Do what `micro.kernels.absorb_unread_` does; return what it returns, and the sums of the new residual."""
    loops = _loops_for(residual, grad)
    if loops is None or residual.numel() != grad.numel():
        return kernels.absorb_unread_(residual, grad), sums_of(residual)
    first_bad, sums = loops.absorb_and_sum_(residual, grad)
    return first_bad, Sums(*sums)


def squares_by_piece(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the sums of squares (S,) float64 of neighbouring pieces of ``x`` (numel,), which have these lengths."""
    if kernels.compiled(x):
        found: Tensor = _squares().squares_by_piece(x, lengths)
        return found
    return norms_of(x, lengths).to(torch.float64).square_()


def absorb_and_square_(residual: Tensor, grad: Tensor, lengths: Sequence[int]) -> tuple[FirstBad, Tensor]:
    """Do what `micro.kernels.absorb_unread_` does; return what it returns, and what `squares_by_piece` then would."""
    if not (kernels.compiled(residual) and kernels.compiled(grad)) or residual.numel() != grad.numel():
        return kernels.absorb_unread_(residual, grad), squares_by_piece(residual, lengths)
    found: tuple[FirstBad, Tensor] = _squares().absorb_and_square_(residual, grad, lengths)
    return found


@cache
def _squares() -> ModuleType:
    from micro.kernels import squares

    return squares


def _loops_for(*vectors: Tensor) -> ModuleType | None:
    """Return the module of the compiled sums that serves these vectors, on a CPU or a GPU; None where torch does."""
    if kernels.on_gpu(*vectors):
        return _on_gpu()
    return _on_cpu() if all(map(kernels.compiled, vectors)) else None


@cache
def _on_cpu() -> ModuleType:
    from micro.kernels import summing

    return summing


@cache
def _on_gpu() -> ModuleType:
    from micro.kernels.triton import summing

    return summing


def in_torch(x: Tensor, floor: float) -> list[float]:
    """Return the sums in plain torch."""
    chunks = x.split(CHUNK) if x.device.type == "cpu" else (x,)
    rows = torch.stack([_sums(chunk, floor) for chunk in chunks])
    largest, smallest = rows[:, 4].max(), rows[:, 5].min()
    together: list[float] = torch.cat([rows[:, :4].sum(0), torch.stack([largest, smallest])]).tolist()
    return together  # host sync: a threshold follows from them


def _sums(chunk: Tensor, floor: float) -> Tensor:
    magnitudes = chunk.abs()
    counts = magnitudes > floor
    value, magnitude = chunk.where(counts, 0).double(), magnitudes.where(counts, 0).double()
    least = magnitudes.where(counts, torch.inf).double()
    if not chunk.numel():
        return torch.cat([value.new_zeros(5), value.new_full((1,), torch.inf)])
    sums = counts.sum().double(), value.sum(), magnitude.square().sum(), magnitude.sum(), magnitude.max(), least.min()
    return torch.stack(sums)
