"""The density asked for is the density given, at every step of a schedule."""

import math
from itertools import pairwise

import pytest

import micro
from micro.density.base import target_count


@pytest.mark.parametrize("density", [1, 1.0, 0.5, 1e-6])
def test_a_constant_stays(density: float) -> None:
    schedule = micro.Constant(density)
    assert [schedule.at(step) for step in (0, 1, 10**6)] == [density] * 3


@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.1, 2.0, math.nan, math.inf, "0.1", None])
def test_a_density_is_a_share(density: float) -> None:
    with pytest.raises(ValueError, match=r"^density must be in \(0, 1\], got"):
        micro.Constant(density)
    with pytest.raises(ValueError, match=r"^density must be in \(0, 1\], got"):
        micro.WarmUp(density=density, start_density=0.5, steps=3)
    with pytest.raises(ValueError, match=r"^start_density of the warm-up must be in \(0, 1\], got"):
        micro.WarmUp(density=0.5, start_density=density, steps=3)


def test_a_reducer_checks_its_density_when_it_is_built() -> None:
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got 2.0"):
        micro.SparseReducer(micro.TopK(), 2.0)


@pytest.mark.parametrize("steps", [0, -1])
def test_a_warm_up_takes_steps(steps: int) -> None:
    with pytest.raises(ValueError, match=f"steps of the warm-up must be at least 1, got {steps}"):
        micro.WarmUp(density=0.01, start_density=0.5, steps=steps)


@pytest.mark.parametrize(("start", "density"), [(0.25, 0.001), (0.001, 0.25), (1.0, 1.0)])
def test_a_warm_up_changes_by_a_constant_factor(start: float, density: float) -> None:
    schedule = micro.WarmUp(density=density, start_density=start, steps=5)
    path = [schedule.at(step) for step in range(6)]
    assert path[0] == start
    assert path[-1] == density
    factors = [later / earlier for earlier, later in pairwise(path)]
    assert factors == pytest.approx([(density / start) ** (1 / 5)] * 5)


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


def test_as_many_stages_as_steps_is_no_stairs() -> None:
    stairs, slope = (micro.WarmUp(density=0.01, start_density=0.5, steps=9, stages=stages) for stages in (9, 0))
    assert [stairs.at(step) for step in range(12)] == [slope.at(step) for step in range(12)]


@pytest.mark.parametrize("stages", [-1, 6])
def test_stages_are_at_most_steps(stages: int) -> None:
    with pytest.raises(ValueError, match=rf"stages of the warm-up must be in \[0, 5\], its steps, got {stages}"):
        micro.WarmUp(density=0.01, start_density=0.5, steps=5, stages=stages)


def test_a_warm_up_ends_at_the_density_itself_and_not_beside_it() -> None:
    for thousandth in range(1, 1000):
        schedule = micro.WarmUp(density=thousandth / 1000, start_density=0.809, steps=4)
        assert [schedule.at(step) for step in (4, 5, 10**6)] == [thousandth / 1000] * 3


@pytest.mark.parametrize(
    ("density", "numel", "k"), [(0.1, 1000, 100), (0.1, 1009, 100), (1.0, 7, 7), (0.001, 10, 1), (1e-9, 1, 1)]
)
def test_k_is_rounded_down_but_at_least_one(density: float, numel: int, k: int) -> None:
    assert target_count(density, numel) == k
