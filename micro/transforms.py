"""The frequency domain: an orthonormal Fourier transform of a flat vector of any length.

The vector is padded with zeros to a length whose only prime factors are 2, 3 and 5, so that no length is slow. Padding
is exact: it adds no energy, and the inverse is cut to the length of the vector. Where the spectrum was changed in
between, the cut removes what the change put into the padding: an error in the vector is at most that in the spectrum.

The spectrum of a real vector is kept as its complex bins from zero to the highest frequency. All but the first and the
last stand for two frequencies each; those two are real, and kept divided by sqrt(2). So every bin counts alike, and
Parseval's identity reads: energy of the vector = 2 * sum(abs(bin) ** 2).
"""

import math
from functools import cache

import torch
from torch import Tensor


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
