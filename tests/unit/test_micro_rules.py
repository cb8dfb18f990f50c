"""MiCRO's rules: what is particular to the published one, and the agreed one against brute force."""

import math
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import micro
from micro.partition import cyclic_slice
from micro.planning.volumes import calls_of
from micro.zoo.exdyna import ExDyna
from tests.products import grid

NUMEL = 20_000


def build(rule: str, numel: int, world_size: int, density: float) -> micro.Simulation:
    reducer = micro.SparseReducer(micro.Micro(rule=rule), density)  # type: ignore[arg-type]
    return micro.Simulation(reducer, micro.Layout.flat(numel), world_size)


def exactly(simulation: micro.Simulation, acc: Tensor) -> micro.simulate.SimulatedStep:
    """Take a step whose accumulators are ``acc`` (world_size, numel)."""
    return simulation.step(acc - torch.stack(simulation.residuals()))


# --- published: the authors' recorded runs are held by test_fidelity --------------------------------------------------


def test_published_follows_its_three_factors() -> None:
    numel, k, thresholds = 1000, 50, []
    simulation = build("published", numel, 2, k / numel)
    for count in (60, 55, 50, 46, 45, 10, 0):
        grads = torch.zeros(2, numel)
        grads[:, torch.arange(count) * (numel // max(count, 1))] = 1e6  # all of them, whatever the threshold
        thresholds.append(simulation.step(grads).stats[0].threshold or 0.0)
    assert thresholds[0] == 1 / (2 * math.sqrt(k))
    factors = [after / before for before, after in pairwise(thresholds)]
    assert factors == pytest.approx([1.005, 1.00125, 1.00125, 1.00125, 0.995, 0.995])


def test_published_counts_nothing_on_a_single_rank_so_that_its_threshold_falls() -> None:
    simulation = build("published", 1000, 1, 0.05)
    thresholds = [simulation.step(torch.full((1, 1000), 1e6)).stats[0].threshold or 0.0 for _ in range(5)]
    assert [after / before for before, after in pairwise(thresholds)] == pytest.approx([0.995] * 4)


def test_published_sends_one_arbitrary_coordinate_from_an_empty_search() -> None:
    simulation = build("published", 10, 3, 0.5)  # slices [0, 4), [4, 7), [7, 10)
    for t in range(5):
        update = exactly(simulation, torch.full((3, 10), 1e-6)).update
        assert update.nonzero().view(-1).tolist() == [t % 4, 4 + t % 3, 7 + t % 3]


def test_published_starts_by_its_rule_where_buckets_changed() -> None:
    reducer, comm, cpu = micro.SparseReducer(micro.Micro(rule="published"), 0.1), micro.comm.Comm(), torch.device("cpu")
    whole = reducer.start(micro.Layout(("a", "b"), ((50,), (90,))), torch.float32, cpu)
    reducer.reduce_(whole, torch.ones(140), comm)
    part = reducer.rebuild(micro.Layout.flat(90, "b"), [whole], torch.float32, cpu)
    stats = reducer.reduce_(part, torch.ones(90), comm)
    assert (stats.step, stats.threshold) == (1, 1 / (2 * math.sqrt(9)))


# --- agreed: exactly k, in the same step ------------------------------------------------------------------------------


def normal(randomness: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=randomness, dtype=torch.float64)


def laplace(randomness: torch.Generator, *shape: int) -> Tensor:
    uniform = torch.rand(*shape, generator=randomness, dtype=torch.float64)
    return (1 - uniform).log() * normal(randomness, *shape).sign()


def student(randomness: torch.Generator, *shape: int) -> Tensor:
    return normal(randomness, *shape) / (normal(randomness, 3, *shape) ** 2).mean(0).sqrt()


def layered(randomness: torch.Generator, *shape: int) -> Tensor:
    scales = torch.logspace(-4, 0, 16, dtype=torch.float64)[torch.arange(16) * 5 % 16]  # large and small mixed
    sizes = [len(part) for part in torch.arange(shape[-1]).tensor_split(16)]
    return normal(randomness, *shape) * scales.repeat_interleave(torch.tensor(sizes))


STREAMS = {
    "normal": normal,
    "laplace": laplace,
    "student": student,
    "layers": layered,
}
JUMPS = (1.0, 1.0, 10.0, 10.0, 0.1, 0.1, 0.1, 1.0, 1.0)  # of the gradient's scale, from step to step


@lru_cache(maxsize=32)
def draw(stream: str, world_size: int, step: int, numel: int = NUMEL) -> Tensor:
    """Return (world_size, numel) gradients of one step; shared by many tests, to be left as they are."""
    return STREAMS[stream](torch.Generator().manual_seed(step), world_size, numel).float()


@grid(stream=STREAMS, world_size=[1, 3, 8, 64], density=[0.1, 0.01, 0.001, 0.0001])
def test_agreed_has_no_density_error_at_any_step(stream: str, world_size: int, density: float) -> None:
    scales, numel = (JUMPS, NUMEL) if world_size <= 8 else ((1.0, 10.0, 1.0), NUMEL // 2)
    grads, simulation = draw(stream, world_size, 0, numel), build("agreed", numel, world_size, density)
    for scale in scales:
        grads = grads.roll(7919, dims=1)  # another gradient of the same stream
        stats = simulation.step(scale * grads).stats[0]
        assert stats.global_count == sum(stats.counts) == stats.target_count == int(density * numel)


@pytest.mark.slow
@grid(stream=STREAMS, world_size=[2, 5])
def test_agreed_takes_what_one_threshold_over_all_slices_would(stream: str, world_size: int) -> None:
    k = 200
    simulation = build("agreed", NUMEL, world_size, k / NUMEL)
    for step in range(6):
        grads = draw(stream, world_size, step)
        searched = searched_by_all(torch.stack(simulation.residuals()) + grads, step)
        result = simulation.step(grads)
        chosen = result.update.nonzero().view(-1)
        for rank in range(world_size):
            start, stop = cyclic_slice(NUMEL, step, rank, world_size)
            mine = chosen[(chosen >= start) & (chosen < stop)] - start
            assert mine.numel() == result.stats[0].counts[rank]
            assert mine.tolist() == searched[start:stop].topk(mine.numel()).indices.sort().values.tolist()
        missed = set(searched.topk(k).indices.tolist()) - set(chosen.tolist())
        assert len(missed) <= 0.1 * k  # all of them lie in one bin, whose top and bottom are this near
        assert not missed or searched[list(missed)].max() <= 1.1 * searched[chosen].min()
        assert result.stats[0].threshold == pytest.approx(float(searched.topk(k).values[-1]), rel=0.1)


def searched_by_all(acc: Tensor, step: int) -> Tensor:
    """Return (numel,) magnitudes, each as the rank sees it that searches there."""
    magnitudes = torch.empty(acc.shape[1])
    for rank in range(acc.shape[0]):
        start, stop = cyclic_slice(acc.shape[1], step, rank, acc.shape[0])
        magnitudes[start:stop] = acc[rank, start:stop].abs()
    return magnitudes


def test_agreed_finds_a_lost_cut_again_within_the_step_and_then_costs_128_bytes() -> None:
    simulation = build("agreed", NUMEL, 2, 0.01)
    for step, (scale, num_collectives) in enumerate([(1.0, 4), (1.0, 3), (1e-3, 5), (1e-3, 3)]):
        stats = exactly(simulation, scale * draw("normal", 2, step)).stats[0]
        assert (stats.density_error, stats.num_collectives) == (0.0, num_collectives)
        assert num_collectives > 3 or stats.counts_bytes == 128


@pytest.mark.parametrize("nonzero", [0, 1, 19, 20, 21, 40, 500])
def test_agreed_takes_what_there_is_when_that_is_less_than_k(nonzero: int) -> None:
    numel, k = 1000, 20
    simulation = build("agreed", numel, 3, k / numel)
    for step in range(4):
        kept = torch.randperm(numel, generator=torch.Generator().manual_seed(step))[:nonzero]
        grads = torch.zeros(3, numel)
        grads[:, kept] = draw("laplace", 1, step, numel)[0, kept]
        result = exactly(simulation, grads)
        assert result.stats[0].global_count == min(k, nonzero)
        assert set(result.update.nonzero().view(-1).tolist()) <= set(kept.tolist())


@pytest.mark.parametrize("values", [[1.0], [1.0, -1.0, 2.0], [0.0, 3.0, 3.0]])
@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_agreed_shares_ties_among_the_ranks(values: list[float], world_size: int) -> None:
    numel, k = 903, 90
    grads = torch.tensor(values).repeat(numel // len(values)).expand(world_size, -1)
    simulation = build("agreed", numel, world_size, k / numel)
    for _ in range(world_size + 1):
        stats = exactly(simulation, grads).stats[0]
        assert stats.density_error == 0.0
        assert max(stats.counts) - min(stats.counts) <= 2  # equal slices hold as many of each, give or take one


@grid(stream=STREAMS, scale=[1e-44, 1e-38, 1e-20, 1e20, 1e29])
def test_agreed_is_exact_at_the_ends_of_single_precision(stream: str, scale: float) -> None:
    k, grads = 100, draw(stream, 3, 0, 2000)
    grads = (grads / grads.abs().max() * scale * 3).float()
    simulation = build("agreed", 2000, 3, k / 2000)
    for step in range(4):
        rolled = grads.roll(step, dims=1) - torch.stack(simulation.residuals())
        nonzero = int(searched_by_all(rolled, step).count_nonzero())
        assert simulation.step(rolled).stats[0].global_count == min(k, nonzero)


def test_agreed_survives_a_gap_below_the_threshold() -> None:
    """A tail that is flat where it was cut says nothing about what lies below; taken at its word, it overflowed."""
    numel, k = 100_000, 3000
    simulation = build("agreed", numel, 2, k / numel)
    lowest = (simulation.step(draw("normal", 2, 0, numel)).stats[0].threshold or 0.0) / 1.2  # of the next candidates
    for step in range(3):
        acc = torch.full((2, numel), 0.5 * lowest)
        acc[:, :k] = torch.linspace(1.7 * lowest, 1.75 * lowest, k)
        acc[:, k] = 1.1 * lowest
        acc = acc[:, torch.randperm(numel, generator=torch.Generator().manual_seed(step))]
        assert exactly(simulation, acc).stats[0].density_error == 0.0


# --- all rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["agreed", "repaired"])
def test_mended_rules_do_not_depend_on_the_unit_of_the_gradient(rule: str) -> None:
    counts = []
    for scale in (1.0, 2.0**20, 2.0**-20):
        simulation = build(rule, NUMEL, 3, 0.01)
        counts.append([simulation.step(scale * draw("normal", 3, step)).stats[0].global_count for step in range(5)])
    assert counts[0] == counts[1] == counts[2]


@grid(
    selector=[micro.Micro(), micro.Micro(rule="repaired"), ExDyna(num_blocks=7, alignment=1)],
    world_size=[1, 2, 3],
)
def test_at_a_density_of_one_everything_is_sent(selector: micro.Selector[object], world_size: int) -> None:
    """Also what is zero on the rank that searches there and not on others: ReLUs make many such gradients."""
    numel, reducer = 500, micro.SparseReducer(selector, micro.WarmUp(density=0.1, start_density=1.0, steps=4))
    simulation = micro.Simulation(reducer, micro.Layout.flat(numel), world_size)
    for step in range(3):
        grads = draw("normal", world_size, step, numel).clone()
        grads[torch.rand(world_size, numel, generator=torch.Generator().manual_seed(step)) < 0.5] = 0.0
        out = simulation.step(grads)
        if step == 0:
            assert torch.equal(out.update, grads.sum(0) / world_size)
            assert not any(residual.any() for residual in simulation.residuals())
            said = calls_of(micro.SparseReducer(selector, 1.0), numel, world_size)
            assert [op for op, _ in said] == [op for op, _ in out.stats[0].calls]
    assert 0 < out.stats[0].global_count < numel
