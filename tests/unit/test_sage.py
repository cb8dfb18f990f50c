"""SAGE: the authors' public code step by step, and what the repaired rule does where that drifts."""

import math
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

import micro
from micro.comm import Comm
from micro.randomness import generator
from micro.requests import carried_out

Vector = np.ndarray[Any, np.dtype[np.float64]]


def gradients(d: int, world_size: int, step: int, *, scale: float = 1.0) -> Vector:
    """Return (world_size, d) gradients whose scale jumps now and then."""
    rng = np.random.default_rng(10 * step + world_size)
    return rng.laplace(size=(world_size, d)) * scale * (1.0 if step < 6 else 5.0)


class Oracle:
    """One rank of the public code, in double precision."""

    def __init__(self, d: int, k: int) -> None:
        self.d, self.k, self.rho = d, k, k / d
        self.threshold, self.mean = 0.0, 1.0
        self.gammas: set[float] = set()

    def choose(self, acc: Vector, step: int, rank: int, seed: int) -> list[int]:
        size = int(self.d / (1 + self.d * 0.05 * 0.05))
        drawn = torch.randint(self.d, (size,), generator=generator(seed, step, rank)).tolist()
        mean = math.fsum(abs(acc[i]) for i in drawn) / size
        if step == 0:
            self.threshold = 1 / (2 * math.sqrt(self.k))
        else:
            alpha = mean / self.mean
            examined = np.count_nonzero(abs(acc) >= self.threshold * alpha) / self.d
            beta = 2 / (1 + math.exp(self.rho - examined))
            gamma = 0.95 if examined / self.rho < 0.1 else 1.05 if examined / self.rho > 10 else 1.0
            self.gammas.add(gamma)
            self.threshold = self.threshold * alpha * beta * gamma
        self.mean = mean
        return [i for i in range(self.d) if abs(acc[i]) >= self.threshold]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(("scale", "gammas"), [(0.01, {0.95}), (0.022, {0.95, 1.0}), (1.0, {1.0, 1.05})])
def test_the_published_rule_step_by_step(world_size: int, scale: float, gammas: set[float]) -> None:
    d, k, seed = 1500, 15, 5
    reducer = micro.SparseReducer(micro.Estimated(fit="sage_published"), k / d, seed=seed)
    oracles, residuals = [Oracle(d, k) for _ in range(world_size)], np.zeros((world_size, d))
    with closing(micro.Simulation(reducer, micro.Layout.flat(d), world_size, dtype=torch.float64)) as simulation:
        for step in range(15):
            grads = gradients(d, world_size, step, scale=scale)
            residuals += grads
            chosen = [oracle.choose(residuals[r], step, r, seed) for r, oracle in enumerate(oracles)]
            union = sorted(set().union(*chosen))
            update = np.zeros(d)
            update[union] = residuals[:, union].mean(0)
            residuals[:, union] = 0
            taken = simulation.step(torch.tensor(grads), residuals=True)
            assert taken.residuals is not None
            assert [stats.threshold for stats in taken.stats] == pytest.approx([o.threshold for o in oracles])
            assert taken.stats[0].counts == tuple(map(len, chosen))
            np.testing.assert_allclose(taken.update.numpy(), update, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(taken.residuals.numpy(), residuals, rtol=1e-12, atol=1e-12)
    assert set().union(*(oracle.gammas for oracle in oracles)) == gammas


@pytest.mark.parametrize("rule", ["published", "repaired"])
def test_nothing_selected_anywhere_is_no_error(rule: Any) -> None:
    reducer = micro.SparseReducer(micro.Estimated(fit="sage" if rule == "repaired" else "sage_published"), 0.01)
    with closing(micro.Simulation(reducer, micro.Layout.flat(1000), 3, dtype=torch.float64)) as simulation:
        for _ in range(3):
            taken = simulation.step(torch.zeros(3, 1000, dtype=torch.float64))
            assert taken.stats[0].counts == (0, 0, 0)
            assert not taken.update.any()
        thresholds = [stats.threshold for stats in taken.stats]
        assert rule == "repaired" or all(threshold and 0 < threshold < math.inf for threshold in thresholds)
        assert simulation.step(torch.tensor(gradients(1000, 3, 5))).update.any() or rule == "published"


def test_the_published_rule_starts_at_the_hard_threshold_whatever_the_gradient() -> None:
    reducer = micro.SparseReducer(micro.Estimated(fit="sage_published"), 0.01)
    with closing(micro.Simulation(reducer, micro.Layout.flat(1600), 1)) as simulation:
        taken = simulation.step(torch.full((1, 1600), 0.124))
        assert taken.stats[0].threshold == 0.125  # 1 / (2 sqrt 16)
        assert taken.stats[0].counts == (0,)


def run_counts(rule: Any, scales: list[float], *, d: int = 10_000, k: int = 100) -> Vector:
    reducer = micro.SparseReducer(micro.Estimated(fit="sage" if rule == "repaired" else "sage_published"), k / d)
    rng = np.random.default_rng(0)
    with closing(micro.Simulation(reducer, micro.Layout.flat(d), 1)) as simulation:
        steps = [simulation.step(torch.tensor(rng.normal(size=(1, d)) * scale).float()) for scale in scales]
    return np.array([step.stats[0].local_count for step in steps]) / k


def test_the_repaired_rule_starts_right_and_stays_so_at_any_scale() -> None:
    for scale in (1e-12, 1.0, 1e12):
        shares = run_counts("repaired", [scale] * 25)
        assert shares[0] == 1.0
        assert shares.min() >= 0.5
        assert shares.max() <= 4 / 3
        assert 0.85 <= shares[5:].mean() <= 1.15


def test_the_repaired_rule_recovers_from_a_jump_in_both_directions() -> None:
    for jump in (100.0, 0.01):
        shares = run_counts("repaired", [1.0] * 10 + [jump] * 20)
        assert shares.min() >= 0.25
        assert shares.max() <= 4 / 3
        assert 0.75 <= shares[-5:].mean() <= 1.25


def test_the_published_rule_does_not_come_down_where_the_repaired_one_does() -> None:
    published, repaired = run_counts("published", [1e-3] * 25), run_counts("repaired", [1e-3] * 25)
    assert published[:8].max() == 0.0  # 1 / (2 sqrt k) is far above every magnitude
    assert repaired.min() >= 0.5


def test_another_seed_draws_another_sample() -> None:
    acc = torch.tensor(np.random.default_rng(0).laplace(size=3000))
    selector, comm = micro.Estimated(fit="sage_published"), Comm()

    def second_threshold(seed: int) -> float | None:
        state = selector.start()
        for index in range(2):
            step = micro.sparse.Step(index, 30, seed, micro.Layout.flat(3000))
            chosen = carried_out(selector.select(state, acc, step, comm), comm)
        return chosen.threshold

    assert second_threshold(1) == second_threshold(1) != second_threshold(2)


def test_the_state_is_saved() -> None:
    selector, comm = micro.Estimated(fit="sage"), Comm()
    state, acc = selector.start(), torch.randn(3000, generator=torch.Generator().manual_seed(0))
    for index in range(3):
        carried_out(selector.select(state, acc, micro.sparse.Step(index, 30, 0, micro.Layout.flat(3000)), comm), comm)
    assert state.track.age == 3
    assert selector.load(selector.save(state)) == state
