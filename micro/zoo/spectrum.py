"""Orthonormal Fourier transform of a flat vector of any length, and selection of its strongest bins.

The vector is padded with zeros to a length whose only prime factors are 2, 3 and 5, so every length is fast. Padding
adds no energy, and the inverse is cut to the original length. If the spectrum was changed, the cut also removes changes
in the padding, so the error of the vector is at most that of the spectrum.

The spectrum of a real vector is stored as complex bins from zero to the highest frequency. All but the first and last
stand for two frequencies; those two are real, and stored divided by sqrt(2). So all bins have equal weight, and
Parseval's identity is: energy of the vector = 2 * sum(abs(bin) ** 2).
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
            times = -(-numel // threes)  # the missing factor, rounded up to a power of two
            best = min(best, threes << (times - 1).bit_length())
            threes *= 3
        fives *= 5
    return best


def num_bins(numel: int) -> int:
    """Return F, the number of complex bins of ``numel`` real numbers."""
    return padded_length(numel) // 2 + 1


def to_spectrum(vector: Tensor) -> Tensor:
    """Return the bins (F,), complex, of ``vector`` (numel,), which is float32 or float64."""
    return _scale_ends_(torch.fft.rfft(vector, n=padded_length(vector.numel()), norm="ortho"), math.sqrt(0.5))


def from_spectrum_(spectrum: Tensor, numel: int) -> Tensor:
    """Return the vector (numel,) of the bins ``spectrum`` (F,), which is overwritten."""
    padded: Tensor = torch.fft.irfft(_scale_ends_(spectrum, math.sqrt(2)), n=padded_length(numel), norm="ortho")
    return padded[:numel]


def _scale_ends_(spectrum: Tensor, factor: float) -> Tensor:
    """Scale the first and last bin and make them real, as those of any real vector; some libraries require it."""
    ends = spectrum[:: spectrum.numel() - 1]
    ends.copy_(ends.real * factor)
    return spectrum


@dataclass(frozen=True, slots=True)
class Bins:
    """One rank's bins: ``indices`` (k,) int32 in the spectrum, ``values`` (k,) complex."""

    indices: Tensor
    values: Tensor


def strongest(spectrum: Tensor, count: int) -> tuple[Bins, Tensor]:
    """Return the ``count`` bins with most energy, and the magnitudes (F,) of all others, zero for the kept bins.

    If the transform overflows, for gradients near the largest number, bins are clamped to that number.
    """
    magnitudes = spectrum.abs().nan_to_num_()
    indices = kernels.largest(magnitudes, count)
    magnitudes.index_fill_(0, indices.long(), 0.0)
    return Bins(indices, complex_bins(real_parts(spectrum.index_select(0, indices)).nan_to_num_())), magnitudes


def vector_of(parts: Sequence[Bins], spectrum: Tensor, numel: int) -> Tensor:
    """Return the vector (numel,) whose spectrum is the sum of ``parts``; ``spectrum`` (F,) is overwritten."""
    spectrum.zero_()
    for part in parts:
        spectrum.index_add_(0, part.indices, part.values)
    return from_spectrum_(spectrum, numel)


def real_parts(bins: Tensor) -> Tensor:
    """Return the alternating real and imaginary parts (2 k,) of complex ``bins`` (k,), not copied."""
    return torch.view_as_real(bins).view(-1)


def complex_bins(parts: Tensor) -> Tensor:
    """Return the bins (k,) from ``real_parts``; copied only if they are not aligned in a message."""
    if parts.storage_offset() % 2:
        parts = parts.clone()
    return torch.view_as_complex(parts.view(-1, 2))
