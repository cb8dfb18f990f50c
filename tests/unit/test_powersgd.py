"""PowerSGD against the same steps written out in numpy."""

import numpy as np
import pytest
import torch

import micro
from micro.reducers.powersgd import PowerSGD

LAYOUT = micro.Layout(("conv", "bias", "conv2", "square"), ((6, 2, 4), (5,), (6, 8), (7, 7)))
MATRICES = {"conv": (6, 8), "conv2": (6, 8), "square": (7, 7)}
WORLD_SIZE, STEPS = 3, 4


def gradients(step: int) -> torch.Tensor:
    randomness = torch.Generator().manual_seed(step)
    return torch.randn(WORLD_SIZE, LAYOUT.numel, generator=randomness, dtype=torch.float64)


def project(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return p q^T, which does not depend on how the columns of p were made orthonormal."""
    return p @ q.T


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_step_is_a_power_iteration_from_the_last_factors(rank: int) -> None:
    reducer = PowerSGD(rank=rank, min_compression=1.01)
    simulation = micro.Simulation(reducer, LAYOUT, WORLD_SIZE, dtype=torch.float64)
    start = reducer.start(LAYOUT, torch.float64, torch.device("cpu")).factors
    factors = {name: start[name].numpy() for name in MATRICES}
    residuals = np.zeros((WORLD_SIZE, LAYOUT.numel))
    for step in range(STEPS):
        grads = gradients(step)
        result = simulation.step(grads, residuals=True)
        acc = residuals + grads.numpy()
        update = np.zeros(LAYOUT.numel)
        for name, place in LAYOUT.slices():
            if name == "bias":
                update[place], residuals[:, place] = acc[:, place].mean(0), 0.0
                continue
            matrices = [row[place].reshape(MATRICES[name]) for row in acc]
            p, _ = np.linalg.qr(np.mean([m @ factors[name] for m in matrices], 0))
            own = [m.T @ p for m in matrices]
            update[place] = project(p, np.mean(own, 0)).ravel()
            for rank_index, m in enumerate(matrices):
                residuals[rank_index, place] = (m - project(p, own[rank_index])).ravel()
            factors[name] = np.mean(own, 0)
        assert result.residuals is not None
        np.testing.assert_allclose(result.update.numpy(), update, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(result.residuals.numpy(), residuals, rtol=1e-9, atol=1e-12)
    simulation.close()


def test_matrices_of_low_rank_come_through_whole() -> None:
    simulation = micro.Simulation(PowerSGD(rank=2), micro.Layout(("w",), ((30, 40),)), 1, dtype=torch.float64)
    randomness = torch.Generator().manual_seed(0)
    w = torch.randn(30, 2, generator=randomness, dtype=torch.float64) @ torch.randn(
        2, 40, generator=randomness, dtype=torch.float64
    )
    update = simulation.step(w.reshape(1, -1)).update
    simulation.close()
    torch.testing.assert_close(update, w.reshape(-1), rtol=1e-9, atol=1e-9)


def test_what_would_hardly_get_smaller_travels_whole() -> None:
    layout = micro.Layout(("small", "large"), ((4, 4), (40, 40)))
    simulation = micro.Simulation(PowerSGD(rank=2, min_compression=2.0), layout, 2, dtype=torch.float64)
    grads = torch.randn(2, layout.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    result = simulation.step(grads, residuals=True)
    simulation.close()
    assert result.residuals is not None
    torch.testing.assert_close(result.update[:16], grads[:, :16].mean(0))
    assert not result.residuals[:, :16].any()
    assert result.residuals[:, 16:].any()
    # two all-reduces on two ranks: 16 + 1 + 2 * 40 numbers, then 2 * 40
    assert result.stats[0].bytes_sent == 8 * (16 + 1 + 80 + 80)
