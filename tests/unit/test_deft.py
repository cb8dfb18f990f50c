"""DEFT: shares and pieces against brute force. The authors' recorded runs are held by test_fidelity."""

import math

import pytest
import torch
from torch import Tensor

import micro
from micro.zoo.deft import Deft, layer_pieces, share_out
from tests.parts import exactly, kept, normal, places, simulated

SMALL = (700, 64, 5, 1, 1203, 33, 300, 2)


def build(numels: tuple[int, ...], world_size: int, density: float) -> micro.Simulation:
    layout = micro.Layout(tuple(f"layer{i}" for i in range(len(numels))), tuple((numel,) for numel in numels))
    return simulated(Deft(), layout, world_size, density=density, dtype=torch.float32)


def draw(numels: tuple[int, ...], world_size: int, step: int) -> Tensor:
    """Return (world_size, numel) gradients whose layers differ in scale; short ones weigh most."""
    scales = torch.tensor([20.0 if numel < 10 else 1 + 3 * (i % 2) for i, numel in enumerate(numels)])
    return normal(world_size, sum(numels), seed=step, dtype=torch.float32) * scales.repeat_interleave(
        torch.tensor(numels)
    )


def test_only_layers_longer_than_a_share_are_cut() -> None:
    assert layer_pieces((5, 12, 7), 2) == ((0, 5), (5, 17), (17, 24))  # 12 is a share, not more
    assert layer_pieces((5, 13, 6), 2) == ((0, 5), (5, 12), (12, 18), (18, 24))
    assert layer_pieces((3,), 5) == ((0, 1), (1, 2), (2, 3))
    assert layer_pieces((4, 0, 4), 1) == ((0, 4), (4, 8))


@pytest.mark.parametrize(
    ("budget", "norms", "sizes", "shares"),
    [
        (100, [1.0, 2.0, 7.0], [1000, 1000, 1000], [10, 20, 70]),
        (100, [90.0, 5.0, 5.0], [10, 1000, 1000], [10, 45, 45]),  # what full pieces leave over goes to the others
        (100, [5.0, 90.0, 0.0], [1000, 60, 7], [40, 60, 0]),
        (20, [1.0, 100.0, 0.0], [4, 9, 7], [4, 9, 7]),
        (10, [0.0, 0.0, 0.0], [50, 30, 20], [5, 3, 2]),  # norms that say nothing are replaced by lengths
        (10, [math.inf, 1.0, 0.0], [50, 30, 20], [5, 3, 2]),
    ],
)
def test_shares_go_by_norm(budget: int, norms: list[float], sizes: list[int], shares: list[int]) -> None:
    assert share_out(budget, norms, sizes) == shares


@pytest.mark.parametrize(("world_size", "density"), [(1, 0.1), (3, 0.5), (3, 0.002), (8, 0.1)])
def test_repaired_takes_the_largest_of_each_piece_by_the_rank_that_serves_it(world_size: int, density: float) -> None:
    pieces, simulation = layer_pieces(SMALL, world_size), build(SMALL, world_size, density)
    sizes = [stop - start for start, stop in pieces]
    for index in range(4):
        acc = kept(simulation) + draw(SMALL, world_size, index)
        result = simulation.step(draw(SMALL, world_size, index))
        stats, updated = result.stats[0], places(result.update)
        norms = torch.stack([torch.stack([part.norm() for part in row.split(sizes)]) for row in acc]).sum(0)
        assert stats.global_count == sum(stats.counts) == len(updated) == int(density * sum(SMALL))
        for (start, stop), k in zip(pieces, share_out(stats.target_count, norms.tolist(), sizes), strict=True):
            inside = [place - start for place in updated if start <= place < stop]
            assert inside in [sorted(row[start:stop].abs().topk(k).indices.tolist()) for row in acc]


def test_repaired_packs_bins_of_like_cost_that_rotate() -> None:
    numels = tuple(100 + 37 * i % 1000 for i in range(60))
    searched = build(numels, 4, 0.01).step(draw(numels, 4, 0)).stats[0].counts
    assert sum(searched) == int(0.01 * sum(numels))
    assert max(searched) < 1.5 * sum(searched) / 4
    simulation, acc = build((8, 900), 2, 8 / 908), torch.where(torch.arange(908) < 8, 1.0, 1e-3)
    counts = [exactly(simulation, acc.expand(2, -1)).stats[0].counts for _ in range(3)]
    assert counts[0] == counts[1][::-1] == counts[2]


def test_published_sends_whole_what_the_packing_rank_wants_whole() -> None:
    """Also where the rank that serves the piece would take less; the authors' recorded runs have no such piece."""
    layout = micro.Layout(("a", "b", "c"), ((8,), (8,), (900,)))
    simulation = simulated(Deft(rule="published"), layout, 2, density=30 / 916, dtype=torch.float32)
    acc = torch.full((2, 916), 1e-3)
    acc[0, :16] = 1.0
    assert set(range(16)) <= set(places(exactly(simulation, acc).update))
