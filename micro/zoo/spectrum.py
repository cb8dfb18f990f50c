"""The frequency domain: an orthonormal Fourier transform of a flat vector of any length, and the strongest of its bins.

The vector is padded with zeros to a length whose only prime factors are 2, 3 and 5, so that no length is slow. Padding
is exact: it adds no energy, and the inverse is cut to the length of the vector. Where the spectrum was changed in
between, the cut removes what the change put into the padding: an error in the vector is at most that in the spectrum.

The spectrum of a real vector is kept as its complex bins from zero to the highest frequency. All but the first and the
last stand for two frequencies each; those two are real, and kept divided by sqrt(2). So every bin counts alike, and
Parseval's identity reads: energy of the vector = 2 * sum(abs(bin) ** 2).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from micro import kernels


@cache
def padded_length(numel: int) -> int:
    """Return the smallest even length, at least ``numel``, without a prime factor above 5."""
    best = 2 * (1 << max(numel - 1, 0).bit_length())
    fives = 2
    while fives < best:
        threes = fives
        while threes < best:
            times = -(-numel // threes)  # the factor that is missing, rounded up to a power of two
            best = min(best, threes << (times - 1).bit_length())
            threes *= 3
        fives *= 5
    return best


def num_bins(numel: int) -> int:
    """Return F, the number of complex bins that the spectrum of ``numel`` real numbers has."""
    return padded_length(numel) // 2 + 1


def to_spectrum(vector: Tensor) -> Tensor:
    """Return the bins (F,), complex, of ``vector`` (numel,), which is float32 or float64."""
    return _scale_ends_(torch.fft.rfft(vector, n=padded_length(vector.numel()), norm="ortho"), math.sqrt(0.5))


def from_spectrum_(spectrum: Tensor, numel: int) -> Tensor:
    """Return the vector (numel,) that has the bins ``spectrum`` (F,), which are used up."""
    padded: Tensor = torch.fft.irfft(_scale_ends_(spectrum, math.sqrt(2)), n=padded_length(numel), norm="ortho")
    return padded[:numel]


def _scale_ends_(spectrum: Tensor, factor: float) -> Tensor:
    """Scale the first and the last bin and make them real: no real vector has more, and some libraries read it."""
    ends = spectrum[:: spectrum.numel() - 1]
    ends.copy_(ends.real * factor)
    return spectrum


@dataclass(frozen=True, slots=True)
class Bins:
    """What one rank sends: ``indices`` (k,) int32 of the spectrum's bins, their ``values`` (k,) complex."""

    indices: Tensor
    values: Tensor


def strongest(spectrum: Tensor, count: int) -> tuple[Bins, Tensor]:
    """Return the ``count`` bins of most energy, and the magnitudes (F,) of all others, zero where a bin is kept.

    Where the transform overflowed, which takes gradients near the largest number there is, bins are cut at that number.
    """
    magnitudes = spectrum.abs().nan_to_num_()
    indices = kernels.largest(magnitudes, count)
    magnitudes.index_fill_(0, indices.long(), 0.0)
    return Bins(indices, complex_bins(real_parts(spectrum.index_select(0, indices)).nan_to_num_())), magnitudes


def vector_of(parts: Sequence[Bins], spectrum: Tensor, numel: int) -> Tensor:
    """Return the vector (numel,) whose spectrum is the sum of ``parts``; ``spectrum`` (F,) is overwritten for it."""
    spectrum.zero_()
    for part in parts:
        spectrum.index_add_(0, part.indices, part.values)
    return from_spectrum_(spectrum, numel)


def real_parts(bins: Tensor) -> Tensor:
    """Return real and imaginary parts (2 k,), in turn, of complex ``bins`` (k,); not copied."""
    return torch.view_as_real(bins).view(-1)


def complex_bins(parts: Tensor) -> Tensor:
    """Return the bins (k,) that ``real_parts`` took apart; copied only where they lie at an odd place of a message."""
    if parts.storage_offset() % 2:
        parts = parts.clone()
    return torch.view_as_complex(parts.view(-1, 2))
