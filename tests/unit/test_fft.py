"""FFT sparsification against dense matrices of waves: the spectrum, what is sent, and what its statistics say."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import micro
from micro.simulate import SimulatedStep
from micro.zoo.fft import FFTReducer
from micro.zoo.range_float import RangeFloat
from tests.parts import kept, normal, simulated

WORLD_SIZE = 3
PADDED = {1: 2, 2: 2, 3: 4, 5: 6, 7: 8, 11: 12, 12: 12, 13: 16, 16: 16, 37: 40, 257: 270}
Through = Callable[[np.ndarray], np.ndarray]


class Oracle:
    """Spectra as products with matrices: row f of ``waves`` is a frequency."""

    def __init__(self, numel: int) -> None:
        length = PADDED[numel]
        turns = np.outer(np.arange(length), np.arange(length)) / length
        self.numel, self.num_bins = numel, length // 2 + 1
        self.waves = np.exp(-2j * np.pi * turns) / np.sqrt(length)

    def bins(self, x: np.ndarray) -> np.ndarray:
        return (self.waves[:, : self.numel] @ x)[: self.num_bins]

    def vector(self, bins: np.ndarray) -> np.ndarray:
        mirrored = np.conj(bins[1:-1][::-1])
        return (np.conj(self.waves) @ np.concatenate([bins, mirrored]))[: self.numel].real

    def sent(self, x: np.ndarray, count: int, through: Through = lambda bins: bins) -> np.ndarray:
        """The bins with most energy, as they arrive; an inner bin is two frequencies."""
        bins = self.bins(x)
        energy = [(1 if f in (0, self.num_bins - 1) else 2) * abs(c) ** 2 for f, c in enumerate(bins)]
        chosen = sorted(sorted(range(len(bins)), key=lambda f: (-energy[f], f))[:count])
        ends = np.where(np.isin(np.arange(len(bins)), [0, len(bins) - 1]), np.sqrt(2), 1)
        thinned = np.zeros_like(bins)
        thinned[chosen] = through((bins / ends)[chosen])
        return self.vector(thinned * ends)


def gradients(numel: int, step: int = 0) -> Tensor:
    return normal(WORLD_SIZE, numel, seed=100 * numel + step)


def once(grads: Tensor, **settings: object) -> SimulatedStep:
    return simulated(FFTReducer(**{"bits": 32} | settings), grads.shape[1], WORLD_SIZE, dtype=grads.dtype).step(grads)


# --- the spectrum -----------------------------------------------------------------------------------------------------


# --- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", PADDED)
@pytest.mark.parametrize("density", [0.1, 0.4, 1.0])
def test_the_strongest_waves_of_each_rank_are_sent_and_the_rest_is_kept(numel: int, density: float) -> None:
    oracle, total = Oracle(numel), np.zeros((WORLD_SIZE, numel))
    count = max(1, math.floor(density * oracle.num_bins))
    simulation = simulated(FFTReducer(density=density, bits=32, feedback=micro.ErrorFeedback()), numel, WORLD_SIZE)
    for index in range(4):
        grads = gradients(numel, index)
        total += grads.numpy()
        sent = np.stack([oracle.sent(row, count) for row in total])
        total -= sent
        step = simulation.step(grads)
        np.testing.assert_allclose(kept(simulation).numpy(), total, rtol=0, atol=1e-12)
        np.testing.assert_allclose(step.update.numpy(), sent.mean(0), rtol=0, atol=1e-12)
        assert step.stats[0].counts == (count,) * WORLD_SIZE
    if density == 1.0:
        assert (step.stats[0].relative_error, step.stats[0].global_density) == (0.0, 1.0)


def test_a_step_whose_transform_overflows_is_left_out() -> None:
    grads = torch.full((WORLD_SIZE, 257), 3e38)
    step = once(grads, density=0.1, nonfinite="skip", bits=10)
    assert (step.stats[0].counts, step.stats[0].skipped) == ((13,) * WORLD_SIZE, True)
    assert not step.update.any()
    with pytest.raises(micro.NonFiniteGradient, match=r"gradient of 'flat' on rank 0, .*is not finite at step 0"):
        once(grads, density=0.1, bits=10)


# --- the quantiser and the statistics ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [6, 10])
def test_parts_arrive_as_the_range_float_says(bits: int) -> None:
    grads, codec = gradients(16), RangeFloat(bits=bits)

    def through(bins: np.ndarray) -> np.ndarray:
        parts = torch.view_as_real(torch.from_numpy(bins)).reshape(-1)
        decoded = codec.decode(codec.encode(parts, (0, 0, 0)), parts.numel(), torch.float64)
        return torch.view_as_complex(decoded.view(-1, 2)).numpy()

    sent = [Oracle(16).sent(row, 5, through) for row in grads.numpy()]
    step = once(grads, density=5 / 9, bits=bits, feedback=micro.NoFeedback())
    np.testing.assert_allclose(step.update.numpy(), np.mean(sent, axis=0), rtol=0, atol=1e-9)
    for grad, vector, stats in zip(grads.numpy(), sent, step.stats, strict=True):  # 16 is not padded: Parseval is exact
        lost = np.linalg.norm(grad - vector) / np.linalg.norm(grad)
        assert stats.relative_error == pytest.approx(lost, rel=1e-6)


@pytest.mark.parametrize("numel", [11, 13, 37, 257])
def test_the_relative_error_is_never_too_small_where_the_vector_is_padded(numel: int) -> None:
    simulation = simulated(FFTReducer(density=0.3, bits=8, feedback=micro.ErrorFeedback()), numel, WORLD_SIZE)
    all_stats = simulation.step(gradients(numel)).stats
    for residual, grad, stats in zip(kept(simulation), gradients(numel), all_stats, strict=True):
        assert float(residual.norm() / grad.norm()) <= stats.relative_error * (1 + 1e-9) < 1
