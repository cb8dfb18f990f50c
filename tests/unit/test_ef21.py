"""EF21: the update is the mean of all estimates, whatever was sent, skipped or saved."""

from typing import Any

import pytest
import torch
from torch import Tensor

import micro

LAYOUT = micro.Layout(("a", "b"), ((20,), (5, 6)))
N = 3


def reducer(smoothing: float = 0.0, density: Any = 0.1) -> micro.SparseReducer:
    feedback = micro.EF21(smoothing=smoothing)
    return micro.SparseReducer(micro.TopK(), density, micro.Gather(), feedback=feedback, nonfinite="skip")


def drawn(step: int) -> Tensor:
    return torch.randn(N, LAYOUT.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def estimates(ranks: micro.Simulation) -> tuple[Tensor, Tensor]:
    """Return each rank's estimate of its gradient, and of their mean, (N, numel) each."""
    return torch.stack(ranks.memory("estimate")), torch.stack(ranks.memory("mean_estimate"))


def simulation(dtype: torch.dtype = torch.float64, **settings: Any) -> micro.Simulation:
    return micro.Simulation(reducer(**settings), LAYOUT, N, dtype=dtype)


@pytest.mark.parametrize("smoothing", [0.0, 0.7])
def test_the_update_is_the_mean_of_all_estimates(smoothing: float) -> None:
    ranks, smooth = simulation(smoothing=smoothing), torch.zeros(N, LAYOUT.numel, dtype=torch.float64)
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


def test_a_constant_gradient_is_found_and_stays() -> None:
    ranks = simulation()
    for _ in range(11):
        update = ranks.step(drawn(0)).update
    torch.testing.assert_close(update, drawn(0).mean(0))
    assert torch.equal(ranks.step(drawn(0)).update, update)


def test_a_step_that_is_left_out_moves_no_estimate() -> None:
    ranks, bad = simulation(), drawn(1)
    ranks.step(drawn(0))
    before = [part.clone() for part in estimates(ranks)]
    bad[1, 3] = float("nan")
    assert not ranks.step(bad).update.any()
    assert all(torch.equal(one, other) for one, other in zip(before, estimates(ranks), strict=True))
    assert ranks.step(drawn(2)).update.any()


def test_a_warm_up_at_density_one_sends_all_changes() -> None:
    ranks = simulation(density=micro.WarmUp(density=0.1, start_density=1.0, steps=2))
    torch.testing.assert_close(ranks.step(drawn(0)).update, drawn(0).mean(0))
    for step in range(1, 4):
        ranks.step(drawn(step))
        own, mean = estimates(ranks)
        torch.testing.assert_close(mean[0], own.mean(0))


def test_a_selector_of_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="ef21"):
        micro.SparseReducer(micro.Everything(), density=1.0, feedback=micro.EF21())
