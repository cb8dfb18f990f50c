"""Finite gradients whose sums overflow: the step is left out, and every coordinate works on."""

from dataclasses import replace

import pytest
import torch

import micro
from micro.zoo.fft import FFTReducer
from tests.parts import normal

LAYOUT = micro.Layout(("a.weight", "a.bias", "b.weight"), ((8, 16), (8,), (11, 11)))


def ordinary(world_size: int, step: int) -> torch.Tensor:
    return normal(world_size, LAYOUT.numel, seed=step, dtype=torch.float32)


def test_an_update_that_overflows_stops_all_ranks_and_names_the_parameter() -> None:
    """What a step adds is bounded, but a residual can be loaded or written to."""
    reducer = micro.SparseReducer(micro.TopK(), 0.05)
    simulation = micro.Simulation(reducer, LAYOUT, 3, dtype=torch.float64)
    for residual in simulation.residuals():
        residual[130] = torch.finfo(torch.float64).max / 2
    with pytest.raises(micro.NonFiniteGradient, match=r"mean gradient of 'a.bias' is not finite at step 0"):
        simulation.step(ordinary(3, 0).double())
    assert simulation.residuals()[0][130] > 0
    assert not simulation.step(ordinary(3, 1).double()).stats[0].skipped


WITH_MOMENTUM = micro.SparseReducer(
    micro.Estimated(fit="dgc"), 0.01, exchange=micro.Gather(), feedback=micro.MomentumCorrection(momentum=0.5)
)
METHODS = [
    micro.SparseReducer(micro.Micro(), 0.01),
    micro.SparseReducer(micro.TopK(), 0.01, exchange=micro.Gather()),
    WITH_MOMENTUM,
    FFTReducer(density=0.1, feedback=micro.ErrorFeedback()),
    micro.PowerSGD(rank=1),
    micro.TwoLevel(reducer=micro.SparseReducer(micro.Micro(), 0.01), ranks_per_node=1),
]


@pytest.mark.slow
@pytest.mark.parametrize("reducer", METHODS, ids=lambda method: method.method)
def test_residuals_beyond_the_range_of_float16_are_sent_in_parts(reducer: micro.Reducer) -> None:
    """A constant gradient of 900 at a low density: a residual passes 65,504 before its turn comes."""
    layout = micro.Layout(("weight", "bias"), ((30, 32), (40,)))
    grads, sent = torch.full((2, layout.numel), 900.0, dtype=torch.float16), torch.zeros(layout.numel).double()
    simulation = micro.Simulation(reducer, layout, 2, dtype=torch.float16)
    for step in range(200):
        out = simulation.step(grads * (step < 150))
        assert out.update.isfinite().all()
        assert not out.stats[0].skipped
        sent += out.update.double()
        if step == 149:
            kept = torch.stack(simulation.residuals()).double().mean(0)
            assert (sent > 0).float().mean() > 0.5, "some coordinates never came to be sent"
            if reducer is not WITH_MOMENTUM:
                torch.testing.assert_close(sent + kept, torch.full_like(sent, 150 * 900.0), rtol=1e-3, atol=100.0)


@pytest.mark.parametrize("reducer", METHODS, ids=lambda method: method.method)
def test_after_an_overflow_every_later_step_counts(reducer: micro.Reducer) -> None:
    skipping = replace(reducer, nonfinite="skip")  # type: ignore[type-var]
    simulation = micro.Simulation(skipping, LAYOUT, 2)
    for step in range(24):
        grads = ordinary(2, step)
        if 0 < step < 4:
            grads[:, 3:60:7] = 0.9 * torch.finfo(torch.float32).max
        out = simulation.step(grads)
        assert all(values.isfinite().all() for values in (out.update, *simulation.residuals()))
        assert all(stats.skipped == out.stats[0].skipped for stats in out.stats)
    assert not out.stats[0].skipped
    assert out.update.any()
