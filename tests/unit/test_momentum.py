"""Momentum correction (DGC's feedback) by hand: what is kept, masked, clipped, and how it is saved."""

import math

import numpy as np
import pytest
import torch

import micro
from micro.feedback import MomentumCorrection
from micro.sparse import SparseValues

CPU = torch.device("cpu")


def test_momentum_is_corrected_and_masked_by_hand() -> None:
    feedback = MomentumCorrection(momentum=0.5)
    memory = feedback.start(3, torch.float64, CPU)
    expected = [  # gradient, (v, u) after it, what is sent where, (v, u) after that
        ([1.0, 2.0, -4.0], ([1.0, 2.0, -4.0], [1.0, 2.0, -4.0]), {2: -4.0}, ([1.0, 2.0, 0.0], [1.0, 2.0, 0.0])),
        ([2.0, 0.0, 1.0], ([3.5, 3.0, 1.0], [2.5, 1.0, 1.0]), {0: 3.0}, ([0.5, 3.0, 1.0], [0.0, 1.0, 1.0])),
        ([0.0, 1.0, 0.0], ([0.5, 4.5, 1.5], [0.0, 1.5, 0.5]), {}, ([0.5, 4.5, 1.5], [0.0, 1.5, 0.5])),
    ]  # the second step sends 3 of 3.5, as a lossy codec would: the rest stays, the momentum goes
    for given, before, sent, after in expected:
        grad = torch.tensor(given, dtype=torch.float64)
        acc, bad = feedback.accumulate_(memory, grad, world_size=4)
        assert bad is None
        assert (acc.tolist(), memory["momentum"].tolist()) == before
        values = torch.tensor(list(sent.values()), dtype=torch.float64)
        feedback.settle_(memory, SparseValues(torch.tensor(list(sent), dtype=torch.int32), values), (), 1.0)
        assert (memory["residual"].tolist(), memory["momentum"].tolist()) == after
        assert not grad.any()


def test_nesterov_form_by_hand() -> None:
    feedback = MomentumCorrection(momentum=0.5, nesterov=True)
    memory = feedback.start(1, torch.float64, CPU)
    for given, u, v in [(2.0, 1.0, 3.0), (4.0, 2.5, 9.5)]:  # u = m (u + g), v += u + g
        feedback.accumulate_(memory, torch.tensor([given], dtype=torch.float64), world_size=1)
        assert (memory["momentum"].item(), memory["residual"].item()) == (u, v)


@pytest.mark.parametrize(("world_size", "factor"), [(1, 0.5), (4, 0.25), (9, 0.5 / 3)])
def test_a_gradient_is_clipped_to_its_share_of_the_norm(world_size: int, factor: float) -> None:
    feedback = MomentumCorrection(momentum=0.5, clip=2.5)
    memory = feedback.start(2, torch.float64, CPU)
    acc, _ = feedback.accumulate_(memory, torch.tensor([3.0, -4.0], dtype=torch.float64), world_size=world_size)
    np.testing.assert_allclose(acc.numpy(), [3 * factor, -4 * factor], rtol=1e-15)
    again, _ = feedback.accumulate_(memory, torch.tensor([0.3, -0.4], dtype=torch.float64), world_size=world_size)
    np.testing.assert_allclose(again.numpy(), [4.5 * factor + 0.3, -6 * factor - 0.4], rtol=1e-15)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_nan_and_infinity_are_dropped_and_the_first_is_named(nesterov: bool, clip: float | None) -> None:
    feedback = MomentumCorrection(momentum=0.5, nesterov=nesterov, clip=clip)
    memory, clean = feedback.start(4, torch.float64, CPU), feedback.start(4, torch.float64, CPU)
    grad = torch.tensor([3.0, math.inf, math.nan, 4.0], dtype=torch.float64)
    acc, bad = feedback.accumulate_(memory, grad, world_size=1)
    expected, _ = feedback.accumulate_(clean, torch.tensor([3.0, 0, 0, 4.0], dtype=torch.float64), world_size=1)
    assert bad == 1
    assert torch.equal(acc, expected)
    assert torch.equal(memory["momentum"], clean["momentum"])


def test_the_momentum_follows_its_parameters() -> None:
    layout = micro.Layout(("a", "b"), ((3,), (2,)))
    reducer = micro.SparseReducer(micro.TopK(), 0.2, feedback=MomentumCorrection())
    simulation = micro.Simulation(reducer, layout, 1, dtype=torch.float64)
    simulation.step(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]], dtype=torch.float64))
    assert simulation.memory("momentum")[0].tolist() == [1.0, 2.0, 3.0, 4.0, 0.0]
    simulation.rebuild(micro.Layout(("b", "a"), ((2,), (3,))))
    assert simulation.memory("momentum")[0].tolist() == [4.0, 0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(("key", "value"), [("momentum", 1.0), ("momentum", math.nan), ("clip", 0.0)])
def test_settings_of_the_feedback_are_checked(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{key} of the feedback .*{value}"):
        MomentumCorrection(**{key: value})  # type: ignore[arg-type]
