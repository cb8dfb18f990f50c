"""The frequency domain against the sums that define it, written out."""

import cmath
import math

import pytest
import torch
from torch import Tensor

from micro.zoo.spectrum import from_spectrum_, num_bins, padded_length, to_spectrum

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 11, 13, 17, 23, 30)


def vector(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel), dtype=torch.float64)


def is_fast(length: int) -> bool:
    for prime in (2, 3, 5):
        while length % prime == 0:
            length //= prime
    return length == 1


def padded(numel: int) -> int:
    length = numel + numel % 2
    while not is_fast(length):
        length += 2
    return length


def frequencies(x: list[float]) -> list[complex]:
    """All frequencies of ``x``, padded, by the definition."""
    length = padded(len(x))
    turns = range(length)
    waves = [sum(v * cmath.exp(-2j * math.pi * f * t / length) for t, v in enumerate(x)) for f in turns]
    return [wave / math.sqrt(length) for wave in waves]


def wave_of(bins: list[complex], numel: int) -> list[float]:
    """The real vector that has these bins, by the definition: every bin but the ends has its mirror image."""
    length = padded(numel)
    values = []
    for t in range(numel):
        ends = math.sqrt(2) * (bins[0].real + bins[-1].real * (-1) ** t)
        inner = sum(2 * (c * cmath.exp(2j * math.pi * f * t / length)).real for f, c in enumerate(bins[1:-1], start=1))
        values.append((ends + inner) / math.sqrt(length))
    return values


def test_padded_length_is_the_next_even_one_without_large_primes() -> None:
    for numel in range(1, 3000):
        assert padded_length(numel) == padded(numel)


@pytest.mark.parametrize("numel", LENGTHS)
def test_spectrum_is_the_discrete_fourier_transform(numel: int) -> None:
    x = vector(numel)
    expected = torch.tensor(frequencies(x.tolist())[: num_bins(numel)], dtype=torch.complex128)
    expected[0] /= math.sqrt(2)
    expected[-1] /= math.sqrt(2)
    spectrum = to_spectrum(x)
    torch.testing.assert_close(spectrum, expected, rtol=0, atol=1e-12)
    assert spectrum[0].imag == 0
    assert spectrum[-1].imag == 0


@pytest.mark.parametrize("numel", LENGTHS)
def test_inverse_of_any_bins_is_the_sum_of_their_waves(numel: int) -> None:
    bins = torch.view_as_complex(vector(2 * num_bins(numel)).view(-1, 2))  # also with ends that are not real
    expected = torch.tensor(wave_of(bins.tolist(), numel), dtype=torch.float64)
    torch.testing.assert_close(from_spectrum_(bins.clone(), numel), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("numel", LENGTHS)
def test_parseval_padded_or_not(numel: int) -> None:
    x = vector(numel)
    energy = 2 * to_spectrum(x).abs().square().sum()
    torch.testing.assert_close(energy, x.square().sum(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("numel", LENGTHS)
def test_an_error_in_the_spectrum_is_the_error_of_the_vector_or_above(numel: int) -> None:
    x = vector(numel)
    spectrum = to_spectrum(x)
    lost = torch.zeros_like(spectrum)
    lost[::2] = spectrum[::2]
    in_spectrum = 2 * lost.abs().square().sum()
    in_vector = (x - from_spectrum_(spectrum - lost, numel)).square().sum()
    assert in_vector <= in_spectrum * (1 + 1e-12)
    if padded(numel) == numel:
        torch.testing.assert_close(in_vector, in_spectrum, rtol=1e-12, atol=0)
