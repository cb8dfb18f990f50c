"""MiCRO's rules: what is particular to the published one, and the agreed one against brute force."""

import math
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import micro
from micro.values.sparse import cyclic_slice
from tests.parts import CPU, STREAMS, exactly, kept, places, simulated
from tests.products import grid

NUMEL = 20_000


def build(rule: str, numel: int, world_size: int, density: float) -> micro.Simulation:
    return simulated(micro.Micro(rule=rule), numel, world_size, density=density, dtype=torch.float32)


def factors(stats: list[micro.StepStats]) -> list[float]:
    return [after.threshold / before.threshold for before, after in pairwise(stats)]


# --- published: the authors' recorded runs are held by test_fidelity --------------------------------------------------


def test_published_follows_its_three_factors() -> None:
    simulation, stats = build("published", 1000, 2, 0.05), []
    for count in (60, 55, 50, 46, 45, 10, 0):
        grads = torch.zeros(2, 1000)
        grads[:, torch.arange(count) * (1000 // max(count, 1))] = 1e6  # all of them, whatever the threshold
        stats.append(simulation.step(grads).stats[0])
    assert stats[0].threshold == 1 / (2 * math.sqrt(50))
    assert factors(stats) == pytest.approx([1.005, 1.00125, 1.00125, 1.00125, 0.995, 0.995])


def test_published_counts_nothing_on_a_single_rank_so_that_its_threshold_falls() -> None:
    simulation = build("published", 1000, 1, 0.05)
    assert factors([simulation.step(torch.full((1, 1000), 1e6)).stats[0] for _ in range(5)]) == pytest.approx(
        [0.995] * 4
    )


def test_published_sends_one_arbitrary_coordinate_from_an_empty_search() -> None:
    simulation = build("published", 10, 3, 0.5)  # slices [0, 4), [4, 7), [7, 10)
    for t in range(5):
        assert places(exactly(simulation, torch.full((3, 10), 1e-6)).update) == [t % 4, 4 + t % 3, 7 + t % 3]


def test_published_starts_by_its_rule_where_buckets_changed() -> None:
    reducer, comm = micro.SparseReducer(micro.Micro(rule="published"), 0.1), micro.comm.ranks.Comm()
    whole = reducer.start(micro.Layout(("a", "b"), ((50,), (90,))), torch.float32, CPU)
    reducer.reduce_(whole, torch.ones(140), comm)
    part = reducer.rebuild(micro.Layout.flat(90, "b"), [whole], torch.float32, CPU)
    stats = reducer.reduce_(part, torch.ones(90), comm)
    assert (stats.step, stats.threshold) == (1, 1 / (2 * math.sqrt(9)))


# --- agreed: exactly k, in the same step ------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def draw(stream: str, world_size: int, step: int, numel: int = NUMEL) -> Tensor:
    """Return (world_size, numel) gradients of one step; shared by many tests, to be left as they are."""
    return STREAMS[stream](torch.Generator().manual_seed(step), world_size, numel).float()


def searched_by_all(acc: Tensor, step: int) -> Tensor:
    """Return (numel,) magnitudes, each as the rank sees it that searches there."""
    magnitudes = torch.empty(acc.shape[1])
    for rank in range(acc.shape[0]):
        start, stop = cyclic_slice(acc.shape[1], step, rank, acc.shape[0])
        magnitudes[start:stop] = acc[rank, start:stop].abs()
    return magnitudes


@grid(stream=STREAMS, world_size=[1, 3, 8, 64], density=[0.1, 0.01, 0.001, 0.0001])
def test_agreed_has_no_density_error_whatever_the_scale_does(stream: str, world_size: int, density: float) -> None:
    scales = (1, 1, 10, 10, 0.1, 0.1, 0.1, 1, 1) if world_size <= 8 else (1, 10, 1)
    grads, simulation = draw(stream, world_size, 0), build("agreed", NUMEL, world_size, density)
    for scale in scales:
        grads = grads.roll(7919, dims=1)  # another gradient of the same stream
        stats = simulation.step(scale * grads).stats[0]
        assert stats.global_count == sum(stats.counts) == stats.target_count == int(density * NUMEL)


@pytest.mark.slow
@grid(stream=STREAMS, world_size=[2, 5])
def test_agreed_takes_what_one_threshold_over_all_slices_would(stream: str, world_size: int) -> None:
    k = 200
    simulation = build("agreed", NUMEL, world_size, k / NUMEL)
    for step in range(6):
        grads = draw(stream, world_size, step)
        searched = searched_by_all(kept(simulation) + grads, step)
        result = simulation.step(grads)
        chosen, stats = places(result.update), result.stats[0]
        for rank in range(world_size):
            start, stop = cyclic_slice(NUMEL, step, rank, world_size)
            mine = [place - start for place in chosen if start <= place < stop]
            assert len(mine) == stats.counts[rank]
            assert mine == sorted(searched[start:stop].topk(len(mine)).indices.tolist())
        missed = list(set(searched.topk(k).indices.tolist()) - set(chosen))
        assert len(missed) <= 0.1 * k  # all of them lie in one bin, whose top and bottom are this near
        assert not missed or searched[missed].max() <= 1.1 * searched[chosen].min()
        assert stats.threshold == pytest.approx(float(searched.topk(k).values[-1]), rel=0.1)


def test_agreed_finds_a_lost_cut_again_within_the_step_and_then_costs_128_bytes() -> None:
    simulation = build("agreed", NUMEL, 2, 0.01)
    for step, (scale, num_collectives) in enumerate([(1.0, 4), (1.0, 3), (1e-3, 5), (1e-3, 3)]):
        stats = exactly(simulation, scale * draw("normal", 2, step)).stats[0]
        assert (stats.density_error, stats.num_collectives) == (0.0, num_collectives)
        assert num_collectives > 3 or stats.counts_bytes == 128


@grid(nonzero=[0, 1, 19, 20, 21, 40, 1000], scale=[1e-44, 1e-38, 1.0, 1e29])
def test_agreed_takes_what_there_is_also_at_the_ends_of_single_precision(nonzero: int, scale: float) -> None:
    simulation = build("agreed", 1000, 3, 0.02)
    for step in range(4):
        grads = draw("laplace", 3, step, 1000) * (torch.arange(1000) * 777 % 1000 < nonzero)
        acc = (3 * scale * grads.double() / draw("laplace", 3, step, 1000).abs().max()).float()
        out, found = exactly(simulation, acc), int(searched_by_all(acc, step).count_nonzero())
        assert out.stats[0].global_count == min(20, found)
        assert set(places(out.update)) <= set(places(acc.abs().sum(0)))


def test_agreed_survives_a_gap_below_the_threshold() -> None:
    """A tail that is flat where it was cut says nothing about what lies below; taken at its word, it overflowed."""
    numel, k = 100_000, 3000
    simulation = build("agreed", numel, 2, k / numel)
    lowest = simulation.step(draw("normal", 2, 0, numel)).stats[0].threshold / 1.2  # lowest of the next candidates
    for step in range(3):
        acc = torch.full((2, numel), 0.5 * lowest)
        acc[:, :k] = torch.linspace(1.7 * lowest, 1.75 * lowest, k)
        acc[:, k] = 1.1 * lowest
        acc = acc[:, torch.randperm(numel, generator=torch.Generator().manual_seed(step))]
        assert exactly(simulation, acc).stats[0].density_error == 0.0
