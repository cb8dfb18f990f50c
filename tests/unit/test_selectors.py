"""Selectors choose what they say, each against a few lines of brute force."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.comm import Comm
from micro.randomness import generator
from micro.requests import carried_out
from micro.selectors.randomk import draw
from micro.sparse import Selection, Step

NUMEL, WORLD_SIZE, K = 30, 3, 4


def gradients(step: int = 0) -> Tensor:
    randomness = torch.Generator().manual_seed(step)
    return torch.randn(WORLD_SIZE, NUMEL, generator=randomness, dtype=torch.float64)


def select(selector: micro.Selector, acc: Tensor, k: int = K) -> Selection:
    step = Step(0, k, 0, micro.Layout.flat(acc.numel()))
    return carried_out(selector.select(selector.start(), acc, step, Comm()), Comm())


def top(row: Tensor) -> set[int]:
    return set(row.abs().topk(K).indices.tolist())


CHOICES: list[tuple[micro.Selector, Callable[[Tensor, int], list[set[int]]]]] = [  # of all ranks, from acc and the step
    (micro.TopK(), lambda acc, _: [top(row) for row in acc]),
    (micro.Leader(), lambda acc, step: [top(row) if rank == step % 3 else set() for rank, row in enumerate(acc)]),
    (micro.Threshold(), lambda acc, _: [set(torch.nonzero(row.abs() >= 0.25).view(-1).tolist()) for row in acc]),
    (
        micro.Threshold(value=1.3),
        lambda acc, _: [set(torch.nonzero(row.abs() >= 1.3).view(-1).tolist()) for row in acc],
    ),
]


@pytest.mark.parametrize(("selector", "choose"), CHOICES)
def test_each_rank_chooses_by_its_own_accumulator(
    selector: micro.Selector, choose: Callable[[Tensor, int], list[set[int]]]
) -> None:
    reducer = micro.SparseReducer(selector, K / NUMEL)
    simulation = micro.Simulation(reducer, micro.Layout.flat(NUMEL), WORLD_SIZE, dtype=torch.float64)
    for step in range(2 * WORLD_SIZE):
        chosen = choose(torch.stack(simulation.residuals()) + gradients(step), step)
        result = simulation.step(gradients(step))
        assert set(result.update.nonzero().view(-1).tolist()) == set().union(*chosen)
        assert result.stats[0].counts == tuple(map(len, chosen))


@pytest.mark.parametrize(("numel", "size", "count"), [(1, 8, 1), (7, 3, 2), (64, 16, 8), (65, 16, 9), (200, 64, 11)])
def test_chunks_give_the_largest_of_each(numel: int, size: int, count: int) -> None:
    acc, expected = gradients()[0].repeat(7)[:numel] * torch.linspace(1, 2, numel), list[int]()
    for start in range(0, numel, size):
        stop = min(start + size, numel)
        share = stop * count // numel - start * count // numel
        expected += sorted(sorted(range(start, stop), key=lambda place: -abs(float(acc[place])))[:share])
    assert select(micro.TopK(scope="chunk", size=size), acc, count).indices.tolist() == expected
    assert len(expected) == count


@pytest.mark.parametrize(
    ("numel", "k"), [(1, 1), (10, 10), (10, 3), (1000, 3), (1000, 249), (1000, 251), (10**6, 1000)]
)
def test_draws_are_distinct_sorted_and_in_range(numel: int, k: int) -> None:
    drawn = draw(numel, k, generator(1, 2))
    assert drawn.numel() == k
    assert drawn.tolist() == sorted(set(drawn.tolist()))
    assert 0 <= int(drawn[0]) <= int(drawn[-1]) < numel
    assert torch.equal(drawn, draw(numel, k, generator(1, 2)))


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
    assert select(micro.RandomK(), torch.zeros(NUMEL)).scale == 1.0
    assert select(micro.RandomK(unbiased=True), torch.zeros(NUMEL)).scale == NUMEL / K


def make(kind: Any, name: str, **settings: object) -> Callable[[], object]:
    return lambda: micro.build(kind, {"name": name, **settings})


def with_fit(**fit: object) -> Callable[[], object]:
    return lambda: micro.Estimated(fit=fit)


def accordion(**settings: object) -> Callable[[], object]:
    return make(micro.Density, "accordion", **{"density": 0.1, "high": 0.5, "interval": 2, **settings})


@pytest.mark.parametrize(
    ("build", "message"),  # the setting, and what was given
    [
        (make(micro.Selector, "topk2"), "topk.*got 'topk2'; did you mean 'topk'"),
        (make(micro.Selector, "micro", rul="agreed"), "got 'rul'; did you mean 'rule'"),
        (make(micro.Selector, "micro", rule="best"), "rule.*got 'best'"),
        (make(micro.Selector, "micro", slack=1.0), "slack.*got 1.0"),
        (make(micro.Selector, "micro", block=0), "block.*got 0"),
        (make(micro.Selector, "micro", block=8, rule="published"), "block.*got rule=published"),
        (make(micro.Selector, "topk", scope="tensor"), "scope.*got 'tensor'"),
        (make(micro.Selector, "threshold", value=0.0), "value.*got 0.0"),
        (make(micro.Selector, "deft", rule="agreed"), "rule.*got 'agreed'"),
        (make(micro.Selector, "exdyna", num_blocks=0), "num_blocks.*got 0"),
        (make(micro.Selector, "exdyna", tolerance=1.0), "tolerance.*got 1.0"),
        (make(micro.Selector, "exdyna", smallest_share=-0.1), "smallest_share.*got -0.1"),
        (lambda: micro.Estimated(fit="x"), "dgc, dgc_published, .*got 'x'"),
        (with_fit(name="sidco", law="normal"), "law.*got 'normal'"),
        (with_fit(name="sidco", stages=0), "stages.*got 0"),
        (with_fit(name="reused_published", reevaluate=0), "reevaluate.*got 0"),
        (accordion(high=0.05), "high.*got 0.05"),
        (accordion(interval=0), "interval.*got 0"),
        (accordion(change=0.0), "change.*got 0.0"),
        (lambda: micro.PerTensor(selector=micro.Micro(slack=0.2)), "one message for each parameter"),
        (lambda: micro.SparseReducer(micro.Micro(slack=0.2), 0.1, exchange=micro.DSA()), "slack.*got exchange dsa"),
    ],
)
def test_a_part_that_cannot_be_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
