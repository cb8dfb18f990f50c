"""FFT sparsification against dense matrices of waves: the spectrum, what is sent, and what its statistics say."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

import micro
from micro.simulate import SimulatedStep
from micro.zoo.fft import FFTReducer
from micro.zoo.range_float import RangeFloat
from micro.zoo.spectrum import from_spectrum_, num_bins, padded_length, to_spectrum

WORLD_SIZE = 3
PADDED = {1: 2, 2: 2, 3: 4, 5: 6, 7: 8, 11: 12, 12: 12, 13: 16, 16: 16, 37: 40, 257: 270}


@dataclass
class Oracle:
    """Spectra as products with matrices: row f of ``waves`` is a frequency."""

    numel: int

    def __post_init__(self) -> None:
        length = PADDED[self.numel]
        turns = np.outer(np.arange(length), np.arange(length)) / length
        self.waves = np.exp(-2j * np.pi * turns) / np.sqrt(length)
        self.num_bins = length // 2 + 1

    def bins(self, x: np.ndarray) -> np.ndarray:
        return (self.waves[:, : self.numel] @ x)[: self.num_bins]

    def kept(self, bins: np.ndarray, count: int) -> list[int]:
        """The bins with most energy; an inner one stands for two frequencies."""
        energy = [(1 if f in (0, self.num_bins - 1) else 2) * abs(c) ** 2 for f, c in enumerate(bins)]
        return sorted(sorted(range(len(bins)), key=lambda f: (-energy[f], f))[:count])

    def vector(self, bins: np.ndarray) -> np.ndarray:
        mirrored = np.conj(bins[1:-1][::-1])
        return (np.conj(self.waves) @ np.concatenate([bins, mirrored]))[: self.numel].real

    def sent(self, x: np.ndarray, count: int) -> np.ndarray:
        bins = self.bins(x)
        thinned = np.zeros_like(bins)
        kept = self.kept(bins, count)
        thinned[kept] = bins[kept]
        return self.vector(thinned)


def gradients(numel: int, step: int = 0) -> Tensor:
    randomness = torch.Generator().manual_seed(100 * numel + step)
    return torch.randn(WORLD_SIZE, numel, generator=randomness, dtype=torch.float64)


def once(grads: Tensor, **settings: object) -> SimulatedStep:
    reducer = FFTReducer(**{"bits": 32} | settings)  # type: ignore[arg-type]
    simulation = micro.Simulation(reducer, micro.Layout.flat(grads.shape[1]), WORLD_SIZE, dtype=grads.dtype)
    return simulation.step(grads, residuals=reducer.feedback.name == "residual")


# --- the spectrum -----------------------------------------------------------------------------------------------------


def test_the_padded_length_is_the_next_even_one_without_large_primes() -> None:
    fast = {2**a * 3**b * 5**c for a in range(1, 13) for b in range(8) for c in range(6)}
    for numel in range(1, 3000):
        assert padded_length(numel) == min(length for length in fast if length >= numel)


@pytest.mark.parametrize("numel", PADDED)
def test_the_spectrum_is_the_fourier_transform_whose_ends_count_once(numel: int) -> None:
    x, oracle, ends = gradients(numel)[0], Oracle(numel), np.sqrt(2)
    expected = oracle.bins(x.numpy())
    expected[[0, -1]] /= ends
    spectrum = to_spectrum(x)
    np.testing.assert_allclose(spectrum.numpy(), expected, rtol=0, atol=1e-12)
    assert spectrum[[0, -1]].imag.tolist() == [0, 0]
    torch.testing.assert_close(2 * spectrum.abs().square().sum(), x.square().sum(), rtol=1e-13, atol=0)  # Parseval
    bins = torch.view_as_complex(gradients(2 * num_bins(numel))[1].view(-1, 2)) if numel != 1 else spectrum
    given = bins.numpy().copy()
    given[[0, -1]] = given[[0, -1]].real * ends  # also with ends that are not real
    np.testing.assert_allclose(from_spectrum_(bins.clone(), numel).numpy(), oracle.vector(given), rtol=0, atol=1e-12)


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", PADDED)
@pytest.mark.parametrize("density", [0.1, 0.4, 1.0])
def test_the_update_is_the_mean_of_the_strongest_waves_of_each_rank(numel: int, density: float) -> None:
    grads, oracle = gradients(numel), Oracle(numel)
    count = max(1, math.floor(density * oracle.num_bins))
    expected = np.mean([oracle.sent(row, count) for row in grads.numpy()], axis=0)
    step = once(grads, density=density)
    np.testing.assert_allclose(step.update.numpy(), expected, rtol=0, atol=1e-12)
    assert step.stats[0].counts == (count,) * WORLD_SIZE
    if density == 1.0:
        torch.testing.assert_close(step.update, grads.mean(0), rtol=0, atol=1e-14)
        assert (step.stats[0].relative_error, step.stats[0].global_density) == (0.0, 1.0)


@pytest.mark.parametrize("numel", PADDED)
def test_the_residual_is_what_the_own_waves_do_not_say(numel: int) -> None:
    oracle, total = Oracle(numel), np.zeros((WORLD_SIZE, numel))
    count = max(1, math.floor(0.3 * oracle.num_bins))
    reducer = FFTReducer(density=0.3, bits=32, feedback=micro.ErrorFeedback())
    simulation = micro.Simulation(reducer, micro.Layout.flat(numel), WORLD_SIZE, dtype=torch.float64)
    for index in range(4):
        total += gradients(numel, index).numpy()
        sent = np.stack([oracle.sent(row, count) for row in total])
        total -= sent
        step = simulation.step(gradients(numel, index))
        np.testing.assert_allclose(torch.stack(simulation.residuals()).numpy(), total, rtol=0, atol=1e-12)
        np.testing.assert_allclose(step.update.numpy(), sent.mean(0), rtol=0, atol=1e-12)


def test_a_step_whose_transform_overflows_is_left_out() -> None:
    grads = torch.full((WORLD_SIZE, 257), 3e38)
    step = once(grads, density=0.1, nonfinite="skip", bits=10)
    assert (step.stats[0].counts, step.stats[0].skipped) == ((13,) * WORLD_SIZE, True)
    assert not step.update.any()
    with pytest.raises(micro.NonFiniteGradient, match=r"gradient of 'flat' on rank 0, .* is not finite at step 0"):
        once(grads, density=0.1, bits=10)


# --- the quantiser and the statistics ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [6, 10])
def test_parts_arrive_as_the_range_float_says(bits: int) -> None:
    numel, grads = 16, gradients(16)
    oracle, codec, sent = Oracle(numel), RangeFloat(bits=bits), []
    for row in grads.numpy():
        bins = oracle.bins(row)
        kept = oracle.kept(bins, 5)
        bins[[0, -1]] /= np.sqrt(2)  # as they travel
        bins.imag[[0, -1]] = 0.0
        parts = torch.from_numpy(np.stack([bins[kept].real, bins[kept].imag], axis=1).reshape(-1))
        decoded = codec.decode(codec.encode(parts, (0, 0, 0)), 10, torch.float64).numpy()
        thinned = np.zeros_like(bins)
        thinned[kept] = decoded[::2] + 1j * decoded[1::2]
        thinned[[0, -1]] *= np.sqrt(2)
        sent.append(oracle.vector(thinned))
    step = once(grads, density=5 / 9, bits=bits)
    np.testing.assert_allclose(step.update.numpy(), np.mean(sent, axis=0), rtol=0, atol=1e-9)
    for rank, stats in enumerate(step.stats):  # 16 is not padded: Parseval is exact
        lost = np.linalg.norm(grads[rank].numpy() - sent[rank]) / np.linalg.norm(grads[rank].numpy())
        assert stats.relative_error == pytest.approx(lost, rel=1e-6)


@pytest.mark.parametrize("numel", [11, 13, 37, 257])
def test_the_relative_error_is_never_too_small_where_the_vector_is_padded(numel: int) -> None:
    step = once(gradients(numel), density=0.3, bits=8, feedback=micro.ErrorFeedback())
    assert step.residuals is not None
    for residual, grad, stats in zip(step.residuals, gradients(numel), step.stats, strict=True):
        assert stats.relative_error is not None
        assert float(residual.norm() / grad.norm()) <= stats.relative_error * (1 + 1e-9) < 1


@pytest.mark.parametrize("density", [0.05, 0.5])
def test_the_relative_error_of_noise_is_what_theory_says(density: float) -> None:
    """Energies of a noise's bins are exponential: the largest p of them hold p (1 + ln(1/p)) of the whole."""
    stats = once(gradients(6000), density=density).stats[0]
    assert stats.relative_error == pytest.approx(math.sqrt(1 - density * (1 + math.log(1 / density))), rel=0.02)
