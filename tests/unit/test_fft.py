"""FFT sparsification against dense matrices of waves, and what its statistics say."""

import math
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

import micro
from experiments.training.recording import step_row
from experiments.training.workers import Reduced
from micro.simulate import SimulatedStep
from micro.zoo.fft import FFTReducer
from micro.zoo.range_float import RangeFloat

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
        length = PADDED[self.numel]
        energy = [(1 if f in (0, length // 2) else 2) * abs(c) ** 2 for f, c in enumerate(bins)]
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


def gradients(numel: int, step: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    randomness = torch.Generator().manual_seed(100 * numel + step)
    return torch.randn(WORLD_SIZE, numel, generator=randomness, dtype=torch.float64).to(dtype)


def simulate(reducer: FFTReducer, numel: int, dtype: torch.dtype = torch.float64) -> micro.Simulation:
    return micro.Simulation(reducer, micro.Layout.flat(numel), WORLD_SIZE, dtype=dtype)


def once(reducer: FFTReducer, grads: Tensor) -> SimulatedStep:
    with closing(simulate(reducer, grads.shape[1], grads.dtype)) as simulation:
        return simulation.step(grads, residuals=reducer.feedback.name == "residual")


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", PADDED)
@pytest.mark.parametrize("density", [0.1, 0.4, 0.9])
def test_update_is_the_mean_of_the_strongest_waves_of_each_rank(numel: int, density: float) -> None:
    grads, oracle = gradients(numel), Oracle(numel)
    count = max(1, math.floor(density * oracle.num_bins))
    expected = np.mean([oracle.sent(row, count) for row in grads.numpy()], axis=0)
    step = once(FFTReducer(density=density, bits=32), grads)
    np.testing.assert_allclose(step.update.numpy(), expected, rtol=0, atol=1e-12)
    assert step.stats[0].counts == (count,) * WORLD_SIZE


@pytest.mark.parametrize("numel", PADDED)
def test_residual_is_what_the_own_waves_do_not_say(numel: int) -> None:
    oracle, total = Oracle(numel), np.zeros((WORLD_SIZE, numel))
    count = max(1, math.floor(0.3 * oracle.num_bins))
    with closing(simulate(FFTReducer(density=0.3, bits=32, feedback=micro.ErrorFeedback()), numel)) as simulation:
        for index in range(4):
            grads = gradients(numel, index)
            total += grads.numpy()
            sent = np.stack([oracle.sent(row, count) for row in total])
            total -= sent
            step = simulation.step(grads, residuals=True)
            assert step.residuals is not None
            np.testing.assert_allclose(step.residuals.numpy(), total, rtol=0, atol=1e-12)
            np.testing.assert_allclose(step.update.numpy(), sent.mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("numel", PADDED)
def test_everything_at_full_length_is_the_dense_mean(numel: int) -> None:
    grads = gradients(numel)
    step = once(FFTReducer(density=1.0, bits=32), grads)
    torch.testing.assert_close(step.update, grads.mean(0), rtol=0, atol=1e-14)
    assert step.stats[0].relative_error == 0.0
    assert step.stats[0].global_density == 1.0


def test_the_constant_wave_counts_once_and_all_others_twice() -> None:
    turns = 2 * torch.pi * torch.arange(16, dtype=torch.float64) / 16
    constant, wave = torch.ones(16, dtype=torch.float64), torch.cos(3 * turns)
    grads = (1.2 * wave + constant).expand(WORLD_SIZE, 16)  # of energies 11.52 and 16, of bins 2.4 and 4
    torch.testing.assert_close(once(FFTReducer(density=0.12, bits=32), grads).update, constant)
    grads = (1.5 * wave + constant).expand(WORLD_SIZE, 16)  # of energies 18 and 16, of bins 3 and 4
    torch.testing.assert_close(once(FFTReducer(density=0.12, bits=32), grads).update, 1.5 * wave)


def test_a_smooth_gradient_is_sent_in_few_bins() -> None:
    turns = 2 * torch.pi * torch.arange(270, dtype=torch.float64) / 270
    grads = (torch.cos(2 * turns) + 0.5 * torch.sin(9 * turns)).expand(WORLD_SIZE, 270)
    step = once(FFTReducer(density=2 / 136, bits=32), grads)
    torch.testing.assert_close(step.update, grads[0])
    assert step.stats[0].relative_error == pytest.approx(0.0, abs=1e-14)


def test_a_single_spike_spreads_over_all_bins() -> None:
    grads = torch.zeros(WORLD_SIZE, 16, dtype=torch.float64)
    grads[:, 5] = 2.0
    step = once(FFTReducer(density=0.5, bits=32), grads)
    count = 4  # floor(9 / 2) bins, all alike but for the ends: 2 / 16 of the energy each
    assert step.stats[0].relative_error == pytest.approx(math.sqrt(1 - count * 2 / 16))
    assert step.update[5] == pytest.approx(2.0 * count * 2 / 16)


def test_a_step_whose_transform_overflows_is_left_out() -> None:
    grads = torch.full((WORLD_SIZE, 257), 3e38)
    step = once(FFTReducer(density=0.1, nonfinite="skip"), grads)
    assert step.stats[0].counts == (13,) * WORLD_SIZE
    assert step.stats[0].skipped
    assert not step.update.any()
    with pytest.raises(micro.NonFiniteGradient, match=r"gradient of 'flat' on rank 0, .* is not finite at step 0"):
        once(FFTReducer(density=0.1), grads)


# --- the quantiser ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [6, 8, 10])
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
    step = once(FFTReducer(density=5 / 9, bits=bits), grads)
    np.testing.assert_allclose(step.update.numpy(), np.mean(sent, axis=0), rtol=0, atol=1e-9)
    for rank, stats in enumerate(step.stats):  # 16 is not padded: Parseval is exact
        lost = np.linalg.norm(grads[rank].numpy() - sent[rank]) / np.linalg.norm(grads[rank].numpy())
        assert stats.relative_error == pytest.approx(lost, rel=1e-6)


@pytest.mark.parametrize("numel", [11, 13, 37, 257])
def test_relative_error_is_never_too_small_where_the_vector_is_padded(numel: int) -> None:
    grads = gradients(numel)
    step = once(FFTReducer(density=0.3, bits=8, feedback=micro.ErrorFeedback()), grads)
    assert step.residuals is not None
    for residual, grad, stats in zip(step.residuals, grads, step.stats, strict=True):
        assert stats.relative_error is not None
        lost = float(residual.norm() / grad.norm())
        assert lost <= stats.relative_error * (1 + 1e-9)
        assert stats.relative_error < 1


@pytest.mark.parametrize("density", [0.05, 0.15, 0.5])
def test_relative_error_of_noise_is_what_theory_says(density: float) -> None:
    """Energies of a noise's bins are exponential: the largest p of them hold p (1 + ln(1/p)) of the whole."""
    stats = once(FFTReducer(density=density, bits=32), gradients(6000)).stats[0]
    assert stats.relative_error == pytest.approx(math.sqrt(1 - density * (1 + math.log(1 / density))), rel=0.02)


# --- the schedule, the statistics, the policy -------------------------------------------------------------------------


def test_densities_are_shares_of_the_bins() -> None:
    stats = once(FFTReducer(density=0.25), gradients(257)).stats[0]
    assert (stats.numel, stats.num_bins, stats.target_count) == (257, 136, 34)
    assert stats.local_density == 0.25
    assert stats.global_density == stats.global_count / 136
    assert 34 < stats.global_count < 3 * 34  # three ranks choose partly the same bins
    same = once(FFTReducer(density=0.25), gradients(257)[:1].expand(WORLD_SIZE, 257)).stats[0]
    assert (same.global_count, same.density_error, same.build_up) == (34, 0.0, 1.0)


def test_records_hold_the_relative_error_and_the_share_of_the_bins() -> None:
    stats = once(FFTReducer(density=0.25), gradients(257)).stats[0]
    reduced = Reduced(loss=torch.tensor(1.0), stats=(stats,), compute_s=0.0, exposed_s=0.0, load_s=0.0)
    row = step_row(0, 0, 1.0, 0.1, reduced, 1.0, 1.0)
    assert row["relative_error"] == stats.relative_error
    assert row["target_density"] == row["local_density"] == 0.25
