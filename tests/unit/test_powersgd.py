"""PowerSGD against the same steps written out in numpy."""

import numpy as np
import pytest
import torch

import micro
from micro.predicted_traffic import calls_of
from micro.reducers.powersgd import PowerSGD
from tests.parts import CPU, kept, normal, simulated

LAYOUT = micro.Layout(("conv", "bias", "conv2", "square"), ((6, 2, 4), (5,), (6, 8), (7, 7)))
MATRICES = {"conv": (6, 8), "conv2": (6, 8), "square": (7, 7)}


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_step_is_a_power_iteration_from_the_last_factors(rank: int) -> None:
    reducer = PowerSGD(rank=rank, min_compression=1.01)
    simulation = simulated(reducer, LAYOUT, 3)
    start = reducer.start(LAYOUT, torch.float64, CPU).factors
    factors, residuals = {name: start[name].numpy() for name in MATRICES}, np.zeros((3, LAYOUT.numel))
    for step in range(4):
        grads = normal(3, LAYOUT.numel, seed=step)
        acc, update = residuals + grads.numpy(), np.zeros(LAYOUT.numel)
        for name, place in LAYOUT.slices():
            if name == "bias":
                update[place], residuals[:, place] = acc[:, place].mean(0), 0.0
                continue
            matrices = [row[place].reshape(MATRICES[name]) for row in acc]
            p, _ = np.linalg.qr(np.mean([m @ factors[name] for m in matrices], 0))
            own = [m.T @ p for m in matrices]
            factors[name] = np.mean(own, 0)
            update[place] = (p @ factors[name].T).ravel()  # however the columns of p were made orthonormal
            residuals[:, place] = [(m - p @ q.T).ravel() for m, q in zip(matrices, own, strict=True)]
        np.testing.assert_allclose(simulation.step(grads).update.numpy(), update, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(kept(simulation).numpy(), residuals, rtol=1e-9, atol=1e-12)


def test_what_would_hardly_get_smaller_travels_whole() -> None:
    layout, reducer = micro.Layout(("small", "large"), ((4, 4), (40, 40))), PowerSGD(rank=2, min_compression=2.0)
    simulation, grads = simulated(reducer, layout, 2), normal(2, 1616, seed=1)
    result = simulation.step(grads)
    torch.testing.assert_close(result.update[:16], grads[:, :16].mean(0))
    assert not kept(simulation)[:, :16].any()
    assert kept(simulation)[:, 16:].any()
    calls = ("all_reduce", 8 * (16 + 1 + 2 * 40)), ("all_reduce", 8 * 2 * 40)
    assert result.stats[0].calls == calls == calls_of(reducer, 1616, 2, element_bytes=8, layout=layout)
    assert calls_of(reducer, 50, 4, layout=micro.Layout.flat(50)) == (("all_reduce", 4 * 51),)


@pytest.mark.parametrize("scale", [2.0**-84, 2.0**84])
def test_gradients_whose_squares_single_precision_does_not_hold_are_reduced_as_others(scale: float) -> None:
    usual, scaled = (simulated(PowerSGD(rank=2), LAYOUT, 2, dtype=torch.float32) for _ in range(2))
    for step in range(4):
        grads = normal(2, LAYOUT.numel, seed=step).float()
        assert torch.equal(scaled.step(grads * scale).update, usual.step(grads).update * scale)
