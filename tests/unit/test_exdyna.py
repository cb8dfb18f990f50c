"""ExDyna: how borders move, and what that is for. The authors' recorded runs are held by test_fidelity."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import micro
from micro.zoo.exdyna import ExDyna, block_spans


def build(selector: micro.Selector[Any], numel: int, world_size: int, density: float) -> micro.Simulation:
    return micro.Simulation(micro.SparseReducer(selector, density), micro.Layout.flat(numel), world_size)


def blocks_of(simulation: micro.Simulation) -> list[list[int]]:
    """Return each rank's own table of blocks."""
    return [rank["selector"]["blocks"] for rank in simulation.state_dict()["ranks"]]


# --- published --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loads", "moves"),  # of three partitions of 8 blocks; the mean is 100, a block is thought to hold 12
    [
        ([100, 100, 100], []),
        ([150, 80, 70], [(0, 1)]),  # then 138, 92, 70: the second is not above the mean
        ([70, 90, 140], [(2, 1)]),
        ([60, 130, 110], [(1, 0)]),
        ([93, 114, 93], [(1, 0)]),  # of the second 102 are left
        ([80, 130, 90], [(1, 0), (1, 2)]),  # 118 is left, still above 105
    ],
)
def test_published_moves_blocks_across_the_mean_and_foresees_what_each_move_changes(
    loads: list[float], moves: list[tuple[int, int]]
) -> None:
    balance, made = ExDyna(rule="published").balance, list[tuple[int, int]]()
    for giver, taker, moved in balance.moves(loads, [8, 8, 8], balance.grid(2400, 24, 1), 1.05):
        assert moved == 12
        made.append((giver, taker))
        loads[giver] -= moved
        loads[taker] += moved
    assert made == moves


def test_published_searches_everything_on_one_rank_and_nothing_of_an_empty_partition() -> None:
    grads = torch.randn(1, 500, generator=torch.Generator().manual_seed(0))
    stats = [build(ExDyna(rule="published"), 500, 1, 0.1).step(grads).stats[0].counts for _ in range(2)]
    assert stats == [(int((grads.abs() >= 1 / (2 * math.sqrt(50))).sum()),)] * 2
    few = build(ExDyna(rule="published"), 601, 3, 0.1)  # fewer elements than blocks: the last partition has all
    assert few.step(torch.ones(3, 601)).stats[0].counts == (0, 0, 601)


def test_published_stops_at_a_quarter_of_the_mean_partition() -> None:
    grads = torch.zeros(2, 2048)
    grads[:, :100] = 1.0  # all in the first blocks, which the second partition never gets
    simulation = build(ExDyna(rule="published", num_blocks=64), 2048, 2, 0.02)
    for _ in range(30):
        simulation.step_(grads.clone())
    assert blocks_of(simulation)[0] == [8, 56]


# --- repaired ---------------------------------------------------------------------------------------------------------

NUMEL, WORLD, DENSITY = 8192, 4, 0.02


def after(
    selector: micro.Selector[Any], steps: int, gradient: Callable[[int], Tensor]
) -> tuple[list[int], list[float]]:
    """Return the table of blocks after so many steps, and how unequally much ranks found in each."""
    simulation = build(selector, NUMEL, WORLD, DENSITY)
    imbalances = [simulation.step(gradient(step)).stats[0].imbalance for step in range(steps)]
    return blocks_of(simulation)[0] if isinstance(selector, ExDyna) else [], imbalances


def drawn(step: int) -> Tensor:
    return torch.randn(WORLD, NUMEL, generator=torch.Generator().manual_seed(step))


@pytest.mark.slow
def test_imbalance_falls_while_with_micro_it_stays() -> None:
    few_layers = torch.where(torch.arange(NUMEL) < NUMEL // 4, 0.02, 0.005)  # mass lies mostly in one quarter
    for selector in (ExDyna(num_blocks=128), ExDyna(rule="published", num_blocks=128, alignment=1), micro.Micro()):
        _, moving = after(selector, 120, lambda step: drawn(step) * few_layers)
        first, last = sum(moving[:5]) / 5, sum(moving[-20:]) / 20
        assert (first > 1.0 and last < 0.25 * first) if isinstance(selector, ExDyna) else min(first, last) > 2.0


def test_repaired_spreads_load_between_partitions_that_are_both_overloaded() -> None:
    grads = drawn(0) * (torch.arange(NUMEL) < NUMEL // 2)
    blocks, _ = after(ExDyna(num_blocks=128), 40, lambda _: grads)
    assert max(blocks[:2]) < 32, "the first two are equally full, but the second has handed on"
    assert sum(blocks) == 128


def test_repaired_does_not_take_a_ranks_scale_for_a_partitions_load() -> None:
    """All partitions are alike, but one rank finds most: its borders would run back and forth with the last count."""
    scales = torch.tensor([2.0, 1.0, 1.0, 1.0])[:, None]
    blocks, _ = after(ExDyna(num_blocks=128), 60, lambda step: drawn(step) * scales)
    assert all(abs(count - 32) <= 6 for count in blocks)


@pytest.mark.parametrize("rule", ["repaired", "published"])
@pytest.mark.parametrize(("numel", "world_size"), [(3, 5), (257, 4), (1023, 3), (40_001, 3)])
def test_partitions_cover_everything_once_and_never_get_too_small(rule: Any, numel: int, world_size: int) -> None:
    selector = ExDyna(rule=rule)
    grid, simulation = selector.balance.grid(numel, 1024, 32), build(selector, numel, world_size, 0.3)
    for step in range(2 * world_size):
        grads = torch.randn(world_size, numel, generator=torch.Generator().manual_seed(step))
        simulation.step(grads * torch.linspace(0, 1, numel))
        tables = blocks_of(simulation)
        assert all(table == tables[0] for table in tables)
        spans = block_spans(tables[0], grid.block_size, numel)
        assert [index for start, stop in spans for index in range(start, stop)] == list(range(numel))
        assert sum(tables[0]) == grid.num_blocks
        assert min(tables[0]) >= min(grid.num_blocks // (4 * world_size), 1)
