"""Selectors choose what they say, each against a few lines of brute force."""

from contextlib import closing

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


def simulate(selector: micro.Selector, density: float = K / NUMEL) -> micro.Simulation:
    reducer = micro.SparseReducer(selector, density)
    return micro.Simulation(reducer, micro.Layout.flat(NUMEL), WORLD_SIZE, dtype=torch.float64)


def chosen(update: Tensor) -> list[int]:
    indices: list[int] = update.nonzero().view(-1).tolist()
    return indices


def test_topk_takes_every_ranks_largest_accumulators() -> None:
    with closing(simulate(micro.TopK())) as simulation:
        for step in range(3):
            acc = torch.stack(simulation.residuals()) + gradients(step)
            result = simulation.step(gradients(step))
            assert chosen(result.update) == sorted(set(acc.abs().topk(K).indices.view(-1).tolist()))
            assert result.stats[0].counts == (K,) * WORLD_SIZE


def test_leaders_take_turns_and_choose_by_their_own_accumulator() -> None:
    with closing(simulate(micro.Leader())) as simulation:
        for step in range(2 * WORLD_SIZE):
            leader = step % WORLD_SIZE
            acc = torch.stack(simulation.residuals()) + gradients(step)
            result = simulation.step(gradients(step))
            assert chosen(result.update) == sorted(acc[leader].abs().topk(K).indices.tolist())
            assert result.stats[0].counts == tuple(K if rank == leader else 0 for rank in range(WORLD_SIZE))


@pytest.mark.parametrize(("selector", "cut"), [(micro.Threshold(), 0.25), (micro.Threshold(value=1.3), 1.3)])
def test_threshold_cuts_at_the_same_magnitude_at_every_step(selector: micro.Threshold, cut: float) -> None:
    with closing(simulate(selector)) as simulation:
        for step in range(3):
            acc = torch.stack(simulation.residuals()) + gradients(step)
            result = simulation.step(gradients(step))
            assert chosen(result.update) == chosen((acc.abs() >= cut).any(0))
            assert result.stats[0].counts == tuple((acc.abs() >= cut).sum(1).tolist())
            assert result.stats[0].threshold == cut  # 1 / (2 sqrt 4) by the rule


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
    draws = 4000
    hits = sum(torch.bincount(draw(numel, k, generator(7, step)), minlength=numel) for step in range(draws))
    share = k / numel
    assert isinstance(hits, Tensor)
    assert ((hits / draws - share).abs() <= 4 * (share * (1 - share) / draws) ** 0.5).all()


def test_generators_differ_by_every_part() -> None:
    seeds = {generator(*parts).initial_seed() for parts in [(0,), (0, 0), (0, 1), (1, 0), (-1, 0), (2**40, 0)]}
    assert len(seeds) == 6


def test_random_k_multiplies_only_where_it_is_unbiased() -> None:
    step, acc = Step(index=0, target_count=K, seed=0, layout=micro.Layout.flat(NUMEL)), torch.zeros(NUMEL)

    def select(selector: micro.RandomK) -> Selection:
        return carried_out(selector.select(selector.start(), acc, step, Comm()), Comm())

    assert select(micro.RandomK()).scale == 1.0
    assert select(micro.RandomK(unbiased=True)).scale == NUMEL / K


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("topk2", {}, "selector must be one of .*topk.*, got 'topk2'; did you mean 'topk'"),
        ("micro", {"rul": "agreed"}, "selector micro has rule, slack, block, got 'rul'; did you mean 'rule'"),
        ("topk", {"k": 3}, "selector topk has scope, size, got 'k'"),
        ("micro", {"rule": "best"}, "rule of micro must be one of agreed, repaired, published, got 'best'"),
        ("threshold", {"value": 0.0}, "value of the threshold must be positive, got 0.0"),
    ],
)
def test_a_selector_that_cannot_be_is_refused(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        micro.build(micro.Selector, {"name": name, **settings})


def test_a_selector_is_built_by_name() -> None:
    assert micro.build(micro.Selector, {"name": "micro", "rule": "repaired"}) == micro.Micro(rule="repaired")
