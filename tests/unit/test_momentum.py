"""Feedback by hand: what momentum correction keeps, masks, clips and saves, and a residual that decays."""

from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.feedback.momentum import MomentumCorrection
from micro.values.sparse import SparseValues
from micro.zoo.fft import FFTReducer
from tests.parts import CPU, kept, normal, simulated


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def begun(numel: int, **settings: Any) -> tuple[MomentumCorrection, Any]:
    feedback = MomentumCorrection(momentum=0.5, **settings)
    return feedback, feedback.start(numel, torch.float64, CPU)


def test_momentum_is_corrected_and_masked_by_hand() -> None:
    feedback, memory = begun(3)
    expected = [  # gradient, (v, u) after it, what is sent where, (v, u) after that
        ([1.0, 2.0, -4.0], ([1.0, 2.0, -4.0], [1.0, 2.0, -4.0]), {2: -4.0}, ([1.0, 2.0, 0.0], [1.0, 2.0, 0.0])),
        ([2.0, 0.0, 1.0], ([3.5, 3.0, 1.0], [2.5, 1.0, 1.0]), {0: 3.0}, ([0.5, 3.0, 1.0], [0.0, 1.0, 1.0])),
        ([0.0, 1.0, 0.0], ([0.5, 4.5, 1.5], [0.0, 1.5, 0.5]), {}, ([0.5, 4.5, 1.5], [0.0, 1.5, 0.5])),
    ]  # the second step sends 3 of 3.5, as a lossy codec would: the rest stays, the momentum goes
    for given, before, sent, after in expected:
        grad = vector(*given)
        acc, bad = feedback.accumulate_(memory, grad, world_size=4)
        assert (acc.tolist(), memory["momentum"].tolist(), bad) == (*before, None)
        values = SparseValues(torch.tensor(list(sent), dtype=torch.int32), vector(*sent.values()))
        feedback.settle_(memory, values, (), 1.0)
        assert (memory["residual"].tolist(), memory["momentum"].tolist()) == after
        assert not grad.any()


def test_nesterov_form_by_hand() -> None:
    feedback, memory = begun(1, nesterov=True)
    for given, u, v in [(2.0, 1.0, 3.0), (4.0, 2.5, 9.5)]:  # u = m (u + g), v += u + g
        feedback.accumulate_(memory, vector(given), world_size=1)
        assert (memory["momentum"].item(), memory["residual"].item()) == (u, v)


@pytest.mark.parametrize(("world_size", "factor"), [(1, 0.5), (4, 0.25), (9, 0.5 / 3)])
def test_a_gradient_is_clipped_to_its_share_of_the_norm(world_size: int, factor: float) -> None:
    feedback, memory = begun(2, clip=2.5)
    acc, _ = feedback.accumulate_(memory, vector(3.0, -4.0), world_size=world_size)
    assert acc.tolist() == pytest.approx([3 * factor, -4 * factor], rel=1e-15)
    again, _ = feedback.accumulate_(memory, vector(0.3, -0.4), world_size=world_size)
    assert again.tolist() == pytest.approx([4.5 * factor + 0.3, -6 * factor - 0.4], rel=1e-15)


def test_the_momentum_follows_its_parameters() -> None:
    layout = micro.Layout(("a", "b"), ((3,), (2,)))
    simulation = simulated(micro.TopK(), layout, 1, density=0.2, feedback=MomentumCorrection())
    simulation.step(vector(1.0, 2.0, 3.0, 4.0, 5.0)[None])
    assert simulation.memory("momentum")[0].tolist() == [1.0, 2.0, 3.0, 4.0, 0.0]
    simulation.rebuild(micro.Layout(("b", "a"), ((2,), (3,))))
    assert simulation.memory("momentum")[0].tolist() == [4.0, 0.0, 1.0, 2.0, 3.0]


DECAY = micro.ErrorFeedback(decay=0.75)


@pytest.mark.parametrize(
    "reducer",
    [micro.SparseReducer(micro.TopK(), 0.1, feedback=DECAY), FFTReducer(density=0.1, bits=32, feedback=DECAY)],
    ids=["sparse", "fft"],
)
def test_what_decays_is_recorded(reducer: micro.Reducer) -> None:
    simulation = simulated(reducer, 40, 2)
    for index in range(3):
        before, grads = kept(simulation), normal(2, 40, seed=index)
        step = simulation.step(grads)
        forgotten = [stats.forgotten for stats in step.stats]
        assert forgotten == pytest.approx((0.25 * before.norm(dim=1)).tolist())
        torch.testing.assert_close((0.75 * before + grads - kept(simulation)).sum(0), 2 * step.update)
    assert all(forgotten)
