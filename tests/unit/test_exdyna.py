"""ExDyna: how borders move, and what that is for. The authors' recorded runs are held by test_fidelity."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.selectors.scaled_elements import ScaledElements
from micro.zoo.exdyna import ExDyna, block_spans
from tests.parts import normal, simulated

NUMEL, WORLD = 8192, 4


def build(selector: micro.Selector[Any], numel: int, world_size: int, density: float) -> micro.Simulation:
    return simulated(selector, numel, world_size, density=density, dtype=torch.float32)


def tables(simulation: micro.Simulation) -> list[list[int]]:
    """Return each rank's own table of blocks."""
    return [rank["selector"]["blocks"] for rank in simulation.state_dict()["ranks"]]


def drawn(step: int) -> Tensor:
    return torch.randn(WORLD, NUMEL, generator=torch.Generator().manual_seed(step))


# --- published --------------------------------------------------------------------------------------------------------


def test_published_searches_everything_on_one_rank_and_nothing_of_an_empty_partition() -> None:
    grads = torch.randn(1, 500, generator=torch.Generator().manual_seed(0))
    stats = [build(ExDyna(rule="published"), 500, 1, 0.1).step(grads).stats[0].counts for _ in range(2)]
    assert stats == [(int((grads.abs() >= 1 / (2 * math.sqrt(50))).sum()),)] * 2
    few = build(ExDyna(rule="published"), 601, 3, 0.1)  # fewer elements than blocks: the last partition has all
    assert few.step(torch.ones(3, 601)).stats[0].counts == (0, 0, 601)


# --- repaired ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_imbalance_falls_while_with_micro_it_stays() -> None:
    few_layers = torch.where(torch.arange(NUMEL) < NUMEL // 4, 0.02, 0.005)  # mass lies mostly in one quarter
    for selector in (ExDyna(num_blocks=128), ExDyna(rule="published", num_blocks=128, alignment=1), micro.Micro()):
        simulation = build(selector, NUMEL, WORLD, 0.02)
        moving = [simulation.step(drawn(step) * few_layers).stats[0].imbalance for step in range(120)]
        first, last = sum(moving[:5]) / 5, sum(moving[-20:]) / 20
        assert (first > 1.0 and last < 0.25 * first) if isinstance(selector, ExDyna) else min(first, last) > 2.0


HALF = (torch.arange(NUMEL) < NUMEL // 2).float()
SCALES = torch.tensor([2.0, 1.0, 1.0, 1.0])[:, None]


@pytest.mark.parametrize(
    ("gradient", "steps", "is_settled"),
    [
        # the first two are equally full, but the second has handed on
        (lambda _: drawn(0) * HALF, 40, lambda blocks: max(blocks[:2]) < 32),
        # all partitions are alike, but one rank finds most: its borders would run back and forth with the last count
        (lambda step: drawn(step) * SCALES, 60, lambda blocks: all(abs(count - 32) <= 6 for count in blocks)),
    ],
)
def test_repaired_takes_overload_from_both_sides_and_no_ranks_scale_for_a_partitions_load(
    gradient: Callable[[int], Tensor], steps: int, is_settled: Callable[[list[int]], bool]
) -> None:
    simulation = build(ExDyna(num_blocks=128), NUMEL, WORLD, 0.02)
    for step in range(steps):
        simulation.step(gradient(step))
    blocks = tables(simulation)[0]
    assert sum(blocks) == 128
    assert is_settled(blocks)


@pytest.mark.parametrize("rule", ["repaired", "published"])
@pytest.mark.parametrize(("numel", "world_size"), [(3, 5), (257, 4), (1023, 3), (40_001, 3)])
def test_partitions_cover_everything_once_and_never_get_too_small(rule: Any, numel: int, world_size: int) -> None:
    selector = ExDyna(rule=rule)
    grid, simulation = selector.balance.grid(numel, 1024, 32), build(selector, numel, world_size, 0.3)
    for step in range(2 * world_size):
        grads = torch.randn(world_size, numel, generator=torch.Generator().manual_seed(step))
        simulation.step(grads * torch.linspace(0, 1, numel))
        first, *others = tables(simulation)
        assert all(table == first for table in others)
        spans = block_spans(first, grid.block_size, numel)
        assert (spans[0][0], spans[-1][1]) == (0, numel)
        assert all(before[1] == after[0] for before, after in pairwise(spans))
        assert sum(first) == grid.num_blocks
        assert min(first) >= min(grid.num_blocks // (4 * world_size), 1)


@pytest.mark.parametrize("selector", [ExDyna(num_blocks=64), ScaledElements(selector=micro.Micro())])
def test_a_saved_state_can_be_loaded_again(selector: Any) -> None:
    """Steps, and a loss scale that changes, leave it as it was."""
    reducer = micro.SparseReducer(selector, 0.05)

    def gradients(step: int) -> Tensor:
        return normal(4, 4000, seed=step) * torch.linspace(1, 20, 4000)

    first = simulated(reducer, 4000, 4)
    for step in range(12):
        first.step(gradients(step))
    saved, updates = first.state_dict(), []
    for _ in range(2):
        again = simulated(reducer, 4000, 4)
        again.load_state_dict(saved)
        for state in again._states:
            reducer.rescale_(state, 2.0)
        updates.append([again.step(gradients(step)).update for step in range(12, 20)])
    assert all(map(torch.equal, *updates))
