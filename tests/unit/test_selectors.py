"""Selectors choose what they say, each against a few lines of brute force."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import micro
from micro.randomness import generator
from micro.selectors.randomk import draw
from tests.parts import kept, normal, places, select, simulated

NUMEL, WORLD_SIZE, K = 30, 3, 4
Choose = Callable[[Tensor, int], list[set[int]]]  # accumulators and the step -> what each rank chooses


def top(row: Tensor) -> set[int]:
    return set(row.abs().topk(K).indices.tolist())


def reaching(threshold: float) -> Choose:
    return lambda acc, _: [set(places(row.abs() >= threshold)) for row in acc]


CHOICES: list[tuple[micro.Selector, Choose]] = [
    (micro.TopK(), lambda acc, _: [top(row) for row in acc]),
    (micro.Leader(), lambda acc, step: [top(row) if rank == step % 3 else set() for rank, row in enumerate(acc)]),
    (micro.Threshold(), reaching(0.25)),
    (micro.Threshold(value=1.3), reaching(1.3)),
]


@pytest.mark.parametrize(("selector", "choose"), CHOICES)
def test_each_rank_chooses_by_its_own_accumulator(selector: micro.Selector, choose: Choose) -> None:
    simulation = simulated(selector, NUMEL, WORLD_SIZE, density=K / NUMEL)
    for step in range(2 * WORLD_SIZE):
        grads = normal(WORLD_SIZE, NUMEL, seed=step)
        chosen = choose(kept(simulation) + grads, step)
        result = simulation.step(grads)
        assert set(places(result.update)) == set().union(*chosen)
        assert result.stats[0].counts == tuple(map(len, chosen))


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


def test_generators_differ_by_every_part() -> None:
    seeds = {generator(*parts).initial_seed() for parts in [(0,), (0, 0), (0, 1), (1, 0), (-1, 0), (2**40, 0)]}
    assert len(seeds) == 6


def test_random_k_multiplies_only_where_it_is_unbiased() -> None:
    scales = [select(micro.RandomK(unbiased=unbiased), torch.zeros(NUMEL), K).scale for unbiased in (False, True)]
    assert scales == [1.0, NUMEL / K]
