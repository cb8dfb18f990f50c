"""Finite gradients whose sums overflow: the step is left out, and every coordinate works on."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

import micro
from micro.zoo.fft import FFTReducer

LAYOUT = micro.Layout(("a.weight", "a.bias", "b.weight"), ((8, 16), (8,), (11, 11)))
LARGEST = torch.finfo(torch.float32).max


def ordinary(world_size: int, step: int) -> torch.Tensor:
    return torch.randn(world_size, LAYOUT.numel, generator=torch.Generator().manual_seed(step))


def test_an_update_that_overflows_stops_all_ranks_and_names_the_parameter() -> None:
    """What a step adds is bounded, but a residual can be loaded or written to."""
    reducer = micro.SparseReducer(micro.TopK(), 0.05)
    with closing(micro.Simulation(reducer, LAYOUT, 3, dtype=torch.float64)) as simulation:
        for residual in simulation.residuals():
            residual[130] = torch.finfo(torch.float64).max / 2
        with pytest.raises(micro.NonFiniteGradient, match=r"mean gradient of 'a.bias' is not finite at step 0"):
            simulation.step(ordinary(3, 0).double())
        assert simulation.residuals()[0][130] > 0
        assert not simulation.step(ordinary(3, 1).double()).stats[0].skipped


METHODS = [
    micro.SparseReducer(micro.Micro(), 0.005),
    micro.SparseReducer(micro.TopK(), 0.005, exchange=micro.Gather()),
    micro.SparseReducer(
        micro.Estimated(fit="dgc"), 0.005, exchange=micro.Gather(), feedback=micro.MomentumCorrection(momentum=0.5)
    ),
    FFTReducer(density=0.1, feedback=micro.ErrorFeedback()),
    micro.PowerSGD(rank=1),
    micro.TwoLevel(reducer=micro.SparseReducer(micro.Micro(), 0.005), ranks_per_node=1),
]


@pytest.mark.parametrize("reducer", METHODS, ids=lambda method: method.method)
def test_residuals_beyond_the_range_of_float16_are_sent_in_parts(reducer: micro.Reducer) -> None:
    """A constant gradient of 600 at a low density: a residual passes 65,504 before its turn comes."""
    world_size = 2
    layout = micro.Layout(("weight", "bias"), ((30, 32), (40,)))
    grads = torch.full((world_size, layout.numel), 600.0, dtype=torch.float16)
    total = torch.zeros(layout.numel, dtype=torch.float64)
    with closing(micro.Simulation(reducer, layout, world_size, dtype=torch.float16)) as simulation:
        for _ in range(300):
            out = simulation.step(grads)
            assert out.update.isfinite().all()
            assert not out.stats[0].skipped
            total += out.update.double()
        kept = torch.stack(simulation.residuals()).double().mean(0)
        if not isinstance(reducer, micro.SparseReducer) or not isinstance(reducer.feedback, micro.MomentumCorrection):
            torch.testing.assert_close(total + kept, torch.full_like(total, 300 * 600.0), rtol=1e-3, atol=100.0)
        reached = total > 0
        assert reached.float().mean() > 0.5, "some coordinates never came to be sent"
        zero = torch.zeros_like(grads)
        for _ in range(300):
            assert simulation.step(zero).update.isfinite().all()


@pytest.mark.parametrize("reducer", METHODS, ids=lambda method: method.method)
def test_after_an_overflow_every_later_step_counts(reducer: micro.Reducer) -> None:
    skipping = replace(reducer, nonfinite="skip")  # type: ignore[type-var]
    with closing(micro.Simulation(skipping, LAYOUT, 2)) as simulation:
        for step in range(24):
            grads = ordinary(2, step)
            if 0 < step < 4:
                grads[:, 3:60:7] = 0.9 * LARGEST
            out = simulation.step(grads)
            assert out.update.isfinite().all()
            assert all(stats.skipped == out.stats[0].skipped for stats in out.stats)
            assert all(residual.isfinite().all() for residual in simulation.residuals())
        assert not out.stats[0].skipped
        assert out.update.any()
