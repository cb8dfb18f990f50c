"""The density asked for is the density given: by a schedule, for the parameters of a pattern."""

from itertools import pairwise
from typing import Any

import pytest
import torch

import micro
from micro.density.base import target_count
from micro.predicted_traffic import calls_of
from micro.selectors.scaled_elements import ScaledElements
from micro.zoo.exdyna import ExDyna
from tests.parts import kept, normal, simulated

LAYERS = micro.Layout(("a.weight", "a.bias", "b.weight"), ((8, 16), (8,), (11, 11)))


@pytest.mark.parametrize(("start", "density"), [(0.25, 0.001), (0.001, 0.25), (1.0, 1.0)])
def test_a_warm_up_changes_by_a_constant_factor(start: float, density: float) -> None:
    schedule = micro.WarmUp(density=density, start_density=start, steps=5)
    path = [schedule.at(step) for step in range(6)]
    assert (path[0], path[-1]) == (start, density)
    factors = [later / earlier for earlier, later in pairwise(path)]
    assert factors == pytest.approx([(density / start) ** (1 / 5)] * 5)
    for thousandth in range(1, 1000, 7):  # it ends at the density itself and not beside it
        schedule = micro.WarmUp(density=thousandth / 1000, start_density=0.809, steps=4)
        assert [schedule.at(step) for step in (4, 5, 10**6)] == [thousandth / 1000] * 3


@pytest.mark.parametrize("steps", [5, 20, 23])
def test_stages_are_stairs_of_equal_length_and_factor(steps: int) -> None:
    schedule = micro.WarmUp(density=0.001, start_density=0.25, steps=steps, stages=4)
    path = [schedule.at(step) for step in range(steps + 2)]
    levels = sorted(set(path), reverse=True)
    assert levels == pytest.approx([0.25, 0.0629, 0.0158, 0.00398, 0.001], rel=0.005)
    lengths = [path.index(later) - path.index(earlier) for earlier, later in pairwise(levels)]
    assert sum(lengths) == steps
    assert max(lengths) - min(lengths) <= 1
    assert path == sorted(path, reverse=True)


@pytest.mark.parametrize(
    ("density", "numel", "k"),
    [(0.1, 1000, 100), (0.1, 1009, 100), (0.29, 100, 29), (1.0, 7, 7), (0.001, 10, 1), (1e-9, 1, 1)],
)
def test_k_is_rounded_down_but_at_least_one(density: float, numel: int, k: int) -> None:
    assert target_count(density, numel) == k


SENDING: dict[str, dict[str, Any]] = {
    "topk, gather": {"part": micro.TopK(), "exchange": micro.Gather()},
    "topk, dsa": {"part": micro.TopK(), "exchange": micro.DSA()},
    "topk, oktopk": {"part": micro.TopK(), "exchange": micro.Oktopk()},
    "topk by layer": {"part": micro.TopK(scope="layer")},
    "micro": {"part": micro.Micro()},
    "micro, scaled": {"part": ScaledElements(selector=micro.Micro())},
    "leader by tensor": {"part": micro.PerTensor(selector=micro.Leader())},
    "exdyna": {"part": ExDyna(num_blocks=7, alignment=1)},
    "leader": {"part": micro.Leader()},
    "gaussiank": {"part": micro.Estimated(fit="gaussiank"), "exchange": micro.Gather()},
    "momentum": {"part": micro.TopK(), "feedback": micro.MomentumCorrection(momentum=0.5)},
}


@pytest.mark.parametrize("name", SENDING)
def test_a_warm_up_from_one_begins_as_dense_training_without_indices(name: str) -> None:
    """Also what is zero on the rank that searches there and not on others is sent: ReLUs make many such gradients."""
    density = micro.WarmUp(density=0.1, start_density=1.0, steps=2, stages=1)
    sparse = simulated(layout=LAYERS, world_size=3, density=density, **SENDING[name])
    dense = simulated(micro.DenseReducer(), LAYERS, 3)
    for step in range(4):
        grads = normal(3, LAYERS.numel, seed=step) * (normal(3, LAYERS.numel, seed=step + 9) > 0)
        out, is_dense = sparse.step(grads), step < 2
        stats = out.stats[0]
        assert kept(sparse).any() != is_dense
        assert (stats.global_count == LAYERS.numel) == is_dense
        if is_dense:
            assert stats.indices_bytes == stats.counts_bytes == 0
            assert {op for op, _ in stats.calls} == {"all_reduce"}
            assert name == "momentum" or torch.equal(out.update, dense.step(grads).update)
            if name == "micro":
                said = calls_of(micro.SparseReducer(micro.Micro(), 1.0), LAYERS.numel, 3, element_bytes=8)
                assert said == stats.calls


@pytest.mark.parametrize("selector", [micro.TopK(scope="layer"), micro.PerTensor(selector=micro.Leader())])
def test_parameters_have_the_density_of_the_first_pattern_that_matches(selector: micro.Selector) -> None:
    assert micro.ByName(patterns=[("a", 0.2)], density=0.1) == micro.ByName(patterns={"a": 0.2}, density=0.1)
    policy = micro.ByName(patterns={"*.bias": 1.0, "a.*": 0.25, "*": 0.1}, density=0.5)
    out = simulated(selector, LAYERS, 1, density=policy).step(normal(1, LAYERS.numel))
    assert [int((piece != 0).sum()) for piece in LAYERS.split(out.update).values()] == [32, 8, 12]
    assert (out.stats[0].target_count, out.stats[0].target_density) == (52, 52 / LAYERS.numel)
