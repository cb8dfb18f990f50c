"""Selectors choose what they say, each against a few lines of brute force."""

import pytest
import torch

import micro
from micro.selectors.randomk import draw
from micro.values.randomness import generator
from tests.parts import normal, places, select, simulated

NUMEL, WORLD_SIZE, K = 30, 3, 4


def test_a_threshold_has_the_value_that_is_given() -> None:
    """What top-k, CLT-k and the usual threshold choose is held by test_fidelity."""
    grads = normal(WORLD_SIZE, NUMEL)
    result = simulated(micro.Threshold(value=1.3), NUMEL, WORLD_SIZE).step(grads)
    assert places(result.update) == places((grads.abs() >= 1.3).any(0))
    assert result.stats[0].counts == tuple((grads.abs() >= 1.3).sum(1).tolist())


@pytest.mark.parametrize(("numel", "size", "count"), [(1, 8, 1), (7, 3, 2), (64, 16, 8), (65, 16, 9), (200, 64, 11)])
def test_chunks_give_the_largest_of_each(numel: int, size: int, count: int) -> None:
    acc, expected = normal(numel), list[int]()
    for start in range(0, numel, size):
        stop = min(start + size, numel)
        share = stop * count // numel - start * count // numel
        expected += sorted(sorted(range(start, stop), key=lambda place: -abs(float(acc[place])))[:share])
    assert select(micro.TopK(scope="chunk", size=size), acc, count).indices.tolist() == expected
    assert len(expected) == count


@pytest.mark.parametrize(("numel", "k"), [(1, 1), (10, 10), (10, 3), (1000, 249), (1000, 251), (10**6, 1000)])
def test_draws_are_distinct_sorted_and_in_range(numel: int, k: int) -> None:
    drawn = draw(numel, k, generator(1, 2)).tolist()
    assert drawn == sorted(set(drawn)) == draw(numel, k, generator(1, 2)).tolist()
    assert len(drawn) == k
    assert 0 <= drawn[0] <= drawn[-1] < numel


@pytest.mark.parametrize(("numel", "k"), [(20, 2), (20, 10)])
def test_draws_are_uniform(numel: int, k: int) -> None:
    draws, share, hits = 4000, k / numel, torch.zeros(numel)
    for step in range(draws):
        hits += torch.bincount(draw(numel, k, generator(7, step)), minlength=numel)
    assert ((hits / draws - share).abs() <= 4 * (share * (1 - share) / draws) ** 0.5).all()


def test_layers_get_their_share_of_the_density_however_few_they_are() -> None:
    layout = micro.Layout((*(f"w{i}" for i in range(20)), "b"), (*[(256,)] * 20, (10,)))
    step = simulated(micro.TopK(scope="layer"), layout, 2, density=1 / 128).step(normal(2, layout.numel, seed=0))
    assert step.stats[0].local_count == 20 * 2 + 1
