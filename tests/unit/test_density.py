"""The density asked for is the density given, at every step of a schedule, for every parameter of a pattern."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

import micro
from micro.density.base import target_count
from micro.density.constant import Constant

LAYERS = micro.Layout(("a.weight", "a.bias", "b.weight"), ((8, 16), (8,), (11, 11)))


def drawn(step: int) -> torch.Tensor:
    return torch.randn(3, LAYERS.numel, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


@pytest.mark.parametrize("density", [0, -0.1, 1.1, math.nan, math.inf, "0.1", None])
def test_a_density_is_a_share(density: float) -> None:
    for name, make in (
        ("density", lambda: Constant(density)),
        ("density", lambda: micro.SparseReducer(micro.TopK(), density)),
        ("density", lambda: micro.WarmUp(density=density, start_density=0.5, steps=3)),
        ("start_density of the warm-up", lambda: micro.WarmUp(density=0.5, start_density=density, steps=3)),
    ):
        with pytest.raises(ValueError, match=rf"{name}.* (must be in \(0, 1\]|must be a name)"):
            make()


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


SENDING: dict[str, dict[str, object]] = {
    "topk, gather": {"selector": micro.TopK(), "exchange": micro.Gather()},
    "topk, dsa": {"selector": micro.TopK(), "exchange": micro.DSA()},
    "topk, oktopk": {"selector": micro.TopK(), "exchange": micro.Oktopk()},
    "topk by layer": {"selector": micro.TopK(scope="layer")},
    "micro": {"selector": micro.Micro()},
    "micro by tensor": {"selector": micro.PerTensor(selector=micro.Micro())},
    "leader": {"selector": micro.Leader()},
    "gaussiank": {"selector": micro.Estimated(fit="gaussiank"), "exchange": micro.Gather()},
    "in pieces": {"selector": micro.TopK(), "exchange": micro.InPieces(each=micro.Gather(), ends=(100, 257))},
    "momentum": {"selector": micro.TopK(), "feedback": micro.MomentumCorrection(momentum=0.5)},
}


@pytest.mark.parametrize("name", SENDING)
def test_a_warm_up_from_one_begins_as_dense_training_without_indices(name: str) -> None:
    density = micro.WarmUp(density=0.1, start_density=1.0, steps=2, stages=1)
    reducer = micro.SparseReducer(density=density, **SENDING[name])  # type: ignore[arg-type]
    simulation = micro.Simulation(reducer, LAYERS, 3, dtype=torch.float64)
    for step in range(4):
        out = simulation.step(drawn(step))
        stats, is_dense = out.stats[0], step < 2
        assert any(residual.any() for residual in simulation.residuals()) != is_dense
        assert (stats.global_count == LAYERS.numel) == is_dense
        if is_dense:
            assert stats.indices_bytes == stats.counts_bytes == 0
            assert {op for op, _ in stats.calls} == {"all_reduce"}
        if step == 0:
            torch.testing.assert_close(out.update, drawn(step).mean(0))


def test_a_codec_is_at_work_at_a_density_of_one_too() -> None:
    reducer = micro.SparseReducer(micro.TopK(), 1.0, exchange=micro.Gather(), codec=micro.Half())
    out = micro.Simulation(reducer, LAYERS, 3, dtype=torch.float64).step(drawn(0), residuals=True)
    assert out.residuals is not None
    assert out.residuals.any(), "the rounding to half precision"


@pytest.mark.parametrize("selector", [micro.Threshold(), micro.Micro(rule="published")])
def test_what_follows_no_density_or_a_published_rule_stays_as_it_is(selector: micro.Selector[object]) -> None:
    reducer = micro.SparseReducer(selector, 1.0)
    assert reducer.at(1.0) is reducer


@pytest.mark.parametrize("selector", [micro.TopK(scope="layer"), micro.PerTensor(selector=micro.Micro())])
def test_parameters_have_the_density_of_the_first_pattern_that_matches(selector: micro.Selector[object]) -> None:
    assert micro.ByName(patterns=[("a", 0.2)], density=0.1) == micro.ByName(patterns={"a": 0.2}, density=0.1)
    policy = micro.ByName(patterns={"*.bias": 1.0, "a.*": 0.25, "*": 0.1}, density=0.5)
    reducer = micro.SparseReducer(selector, policy, exchange=micro.Union())
    out = micro.Simulation(reducer, LAYERS, 1, dtype=torch.float64).step(drawn(0)[:1])
    updated = {name: int((piece != 0).sum()) for name, piece in LAYERS.split(out.update).items()}
    assert updated == {"a.weight": 32, "a.bias": 8, "b.weight": 12}
    assert (out.stats[0].target_count, out.stats[0].target_density) == (52, 52 / LAYERS.numel)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: micro.WarmUp(density=0.01, start_density=0.5, steps=0), "steps.*got 0"),
    (lambda: micro.WarmUp(density=0.01, start_density=0.5, steps=5, stages=6), "stages.*got 6"),
    (lambda: micro.ByName(patterns={}, density=0.1), "patterns.*got {}"),
    (lambda: micro.ByName(patterns=[0.1], density=0.1), r"patterns.*got \[0.1\]"),  # type: ignore[list-item]
    (lambda: micro.ByName(patterns={"a": 2.0}, density=0.1), "'a'.*got 2.0"),
    (lambda: micro.SparseReducer(micro.Micro(), micro.ByName(patterns={"a": 0.2}, density=0.1)), "by_name.*micro"),
    (lambda: micro.ByName(patterns={"c*": 0.2}, density=0.1).check_parameters({"a": (1,)}), r"'c\*'.*'a'"),
]


@pytest.mark.parametrize(("work", "message"), REFUSED)
def test_densities_that_make_no_sense_are_refused(work: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        work()
