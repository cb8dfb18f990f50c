"""EF21: the update is the mean of all estimates, whatever was sent, skipped or saved."""

from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from tests.parts import normal, simulated

NUMEL, N = 50, 3


def simulation(smoothing: float = 0.0, density: Any = 0.1) -> micro.Simulation:
    parts = {"exchange": micro.Gather(), "feedback": micro.EF21(smoothing=smoothing), "nonfinite": "skip"}
    return simulated(micro.TopK(), NUMEL, N, density=density, **parts)


def drawn(step: int) -> Tensor:
    return normal(N, NUMEL, seed=step)


def estimates(ranks: micro.Simulation) -> tuple[Tensor, Tensor]:
    """Return each rank's estimate of its gradient, and of their mean, (N, numel) each."""
    return torch.stack(ranks.memory("estimate")), torch.stack(ranks.memory("mean_estimate"))


@pytest.mark.parametrize("smoothing", [0.0, 0.7])
def test_the_update_is_the_mean_of_all_estimates(smoothing: float) -> None:
    ranks, smooth = simulation(smoothing), torch.zeros(N, NUMEL, dtype=torch.float64)
    for step in range(8):
        before, _ = estimates(ranks)
        smooth = smoothing * smooth + (1 - smoothing) * drawn(step)
        update = ranks.step(drawn(step)).update
        own, mean = estimates(ranks)
        torch.testing.assert_close(mean[0], own.mean(0))
        assert all(torch.equal(each, update) for each in mean)
        moved = own != before  # where it moved it is the gradient, and the largest differences moved
        assert moved.sum(1).tolist() == [5] * N
        torch.testing.assert_close(own[moved], smooth[moved])
        assert (smooth - before).abs().masked_fill(~moved, 9).amin() > (smooth - own).abs().amax(1).amin() - 1e-12


def test_a_step_that_is_left_out_moves_no_estimate() -> None:
    ranks, bad = simulation(), drawn(1)
    ranks.step(drawn(0))
    before = torch.cat(estimates(ranks))
    bad[1, 3] = float("nan")
    assert not ranks.step(bad).update.any()
    assert torch.equal(torch.cat(estimates(ranks)), before)
    assert ranks.step(drawn(2)).update.any()


def test_a_warm_up_at_density_one_sends_all_changes() -> None:
    ranks = simulation(density=micro.WarmUp(density=0.1, start_density=1.0, steps=2))
    torch.testing.assert_close(ranks.step(drawn(0)).update, drawn(0).mean(0))
    for step in range(1, 4):
        ranks.step(drawn(step))
        own, mean = estimates(ranks)
        torch.testing.assert_close(mean[0], own.mean(0))
