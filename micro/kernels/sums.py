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


@dataclass(frozen=True, slots=True)
class UnreadSums:
    """The numbers of `Sums`, in their order, (6,) float64 on an accelerator: its host does not know them yet."""

    numbers: Tensor

    @property
    def count(self) -> Tensor:
        """How much is summed up, ()."""
        return self.numbers[0]

    @property
    def smallest(self) -> Tensor:
        """The smallest magnitude, ()."""
        return self.numbers[5]

    @property
    def mean(self) -> Tensor:
        """The mean, ()."""
        return self.numbers[1] / self.count

    @property
    def mean_magnitude(self) -> Tensor:
        """The mean magnitude, ()."""
        return self.numbers[3] / self.count

    @property
    def variance(self) -> Tensor:
        """The unbiased variance, (); NaN for a single element."""
        return (self.numbers[2] - self.numbers[1] * self.mean).clamp_min(0.0) / (self.count - 1)

    @property
    def variance_of_magnitudes(self) -> Tensor:
        """The unbiased variance of the magnitudes, (); NaN for a single element."""
        return (self.numbers[2] - self.numbers[3] * self.mean_magnitude).clamp_min(0.0) / (self.count - 1)

    def read(self) -> Sums:
        """Return the sums for the host, which waits for them."""
        return Sums(*self.numbers.tolist())  # host sync: where a law's quantile is found on the host


AnySums = Sums | UnreadSums  # of a vector on a CPU, on an accelerator


def sums_of(x: Tensor) -> Sums:
    """Return the sums of ``x`` (numel,)."""
    return sums_above(x, -1.0)


def sums_above(x: Tensor, floor: float) -> Sums:
    """Return the sums of those of ``x`` (numel,) whose magnitude is larger than ``floor``, rounded to its dtype."""
    loops = _loops_for(x)
    return Sums(*(loops.sums(x, floor) if loops else in_torch(x, floor)))


def unread_sums_of(x: Tensor) -> UnreadSums:
    """Return the sums of ``x`` (numel,) on an accelerator, which is not read."""
    return unread_sums_above(x, x.new_full((), -1.0))


def unread_sums_above(x: Tensor, floor: Tensor) -> UnreadSums:
    """Do what `sums_above` does for ``x`` (numel,) on an accelerator, which is not read.

    Args:
        floor: () on the device of ``x``.
    """
    loops, rounded = _loops_for(x), floor.to(x.dtype)
    return UnreadSums(loops.unread_sums(x, rounded.view(1)) if loops else _together(x, rounded))


def soonest_sums_of(x: Tensor) -> AnySums:
    """Return the sums of ``x`` (numel,) as the host has them without waiting."""
    return sums_of(x) if x.device.type == "cpu" else unread_sums_of(x)


def absorb_and_sum_(residual: Tensor, grad: Tensor) -> tuple[FirstBad, AnySums]:
    """Do what `micro.kernels.absorb_unread_` does; return what it returns, and the sums of the new residual."""
    loops = _loops_for(residual, grad)
    if loops is None or residual.numel() != grad.numel():
        return kernels.absorb_unread_(residual, grad), soonest_sums_of(residual)
    first_bad, sums = loops.absorb_and_sum_(residual, grad)
    if not isinstance(sums, Tensor):
        return first_bad, Sums(*sums)
    return first_bad, UnreadSums(sums).read() if residual.device.type == "cpu" else UnreadSums(sums)


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
    together: list[float] = _together(x, floor).tolist()
    return together  # host sync: a threshold follows from them


def _together(x: Tensor, floor: float | Tensor) -> Tensor:
    """Return the sums (6,) in plain torch; a floor that is a tensor () is of the dtype of ``x``."""
    chunks = x.split(CHUNK) if x.device.type == "cpu" else (x,)
    rows = torch.stack([_sums(chunk, floor) for chunk in chunks])
    largest, smallest = rows[:, 4].max(), rows[:, 5].min()
    return torch.cat([rows[:, :4].sum(0), torch.stack([largest, smallest])])


def _sums(chunk: Tensor, floor: float | Tensor) -> Tensor:
    magnitudes = chunk.abs()
    counts = magnitudes > floor
    value, magnitude = chunk.where(counts, 0).double(), magnitudes.where(counts, 0).double()
    least = magnitudes.where(counts, torch.inf).double()
    if not chunk.numel():
        return torch.cat([value.new_zeros(5), value.new_full((1,), torch.inf)])
    sums = counts.sum().double(), value.sum(), magnitude.square().sum(), magnitude.sum(), magnitude.max(), least.min()
    return torch.stack(sums)
