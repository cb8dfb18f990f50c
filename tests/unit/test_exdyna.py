"""ExDyna: the published rule step for step against a re-write of its own, and what moving borders are for."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
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


# --- published: the authors' code as described, in numpy and single precision ----------------------------------------


@dataclass
class PublishedByHand:
    """n workers of the authors' code, one after the other; where it fails, what we do."""

    numel: int
    n: int
    k: int
    num_blocks: int = 1024
    t: int = -1
    delta: float = 1.0
    num_last: int = 1
    counts: list[int] = field(default_factory=list)  # by worker
    lengths: list[int] = field(default_factory=list)  # in blocks
    firsts: list[int] = field(default_factory=list)
    memories: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.memories = np.zeros((self.n, self.numel), np.float32)
        quotient = self.numel // self.num_blocks
        self.size = quotient - quotient % 32
        self.rest = self.numel - self.num_blocks * self.size

    def step(self, grads: np.ndarray) -> np.ndarray:
        """Return the aggregated gradient."""
        self.t += 1
        self.place()
        self.adapt()
        acc = self.memories + grads
        chosen = [self.choose(acc[rank], rank) for rank in range(self.n)]
        everyone = np.concatenate(chosen)
        summed = np.zeros(len(everyone), np.float32)
        for rank in range(self.n):
            summed = summed + acc[rank, everyone]
        aggregated = np.zeros(self.numel, np.float32)
        aggregated[everyone] = summed / np.float32(self.n)
        acc[:, everyone] = 0
        self.memories = acc
        self.counts = [len(indices) for indices in chosen]
        self.num_last = len(everyone)
        return aggregated

    def place(self) -> None:
        if self.t == 0:
            for part in range(self.n):
                self.firsts.append(sum(self.lengths))
                self.lengths.append(self.num_blocks // self.n + (1 if part < self.num_blocks % self.n else 0))
            return
        loads = [0] * self.n
        for worker in range(self.n):
            loads[((self.t - 1) % self.n + worker) % self.n] = self.counts[worker]
        mean = self.num_last // self.n
        if mean == 0:
            return  # ours: nothing moves
        for i in range(self.n - 1):
            u, w = loads[i] / mean, loads[i + 1] / mean
            predicted = math.floor(1 * self.size * (self.num_last / self.numel))
            if u > 1.05 and w < 0.95238:
                direction = -1
            elif u < 0.95238 and w > 1.05:
                direction = 1
            else:
                continue
            giver = i if direction < 0 else i + 1
            if self.lengths[giver] - 1 < self.num_blocks / (4 * self.n):
                continue
            self.lengths[i] += direction
            self.lengths[i + 1] -= direction
            self.firsts[i + 1] += direction
            loads[i] += direction * predicted
            loads[i + 1] -= direction * predicted

    def adapt(self) -> None:
        if self.t == 0:
            self.delta = 1 / (2 * math.sqrt(self.k))
            return
        x = self.num_last / self.k
        self.delta *= 1.005 if x > 1.1 else 1.00125 if x > 0.909 else 0.995

    def choose(self, acc: np.ndarray, rank: int) -> np.ndarray:
        part = (self.t + rank) % self.n
        start = self.firsts[part] * self.size
        stop = (self.firsts[part] + self.lengths[part]) * self.size + (self.rest if part == self.n - 1 else 0)
        found = start + np.flatnonzero(np.abs(acc[start:stop]) >= np.float32(self.delta))
        if len(found) or stop == start:  # ours: nothing from an empty partition
            return found
        return np.array([start + self.t % (stop - start)])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("numel", "scale"),  # blocks of 0, 32, 32 and 64; from far too few, and from too many
    [(601, 0.3), (601, 0.01), (32_768, 0.01), (40_001, 0.3), (70_000, 0.01)],
)
def test_published_is_the_authors_code_step_for_step(world_size: int, numel: int, scale: float) -> None:
    by_hand = PublishedByHand(numel, world_size, int(0.01 * numel))
    randomness = np.random.default_rng(world_size)
    profile = np.full(numel, scale, np.float32)
    profile[: numel // 6] *= 3
    profile[-numel // 12 :] *= 2
    pool = randomness.standard_normal((world_size, 2 * numel), np.float32)
    simulation = build(ExDyna(rule="published"), numel, world_size, 0.01)
    for index in range(32):
        first = 997 * index % numel
        grads = profile * pool[:, first : first + numel]
        expected = by_hand.step(grads)
        got = simulation.step(torch.from_numpy(grads))
        assert got.stats[0].threshold == by_hand.delta, f"step {index}"
        assert got.stats[0].counts == tuple(by_hand.counts), f"step {index}"
        assert np.array_equal(got.update.numpy(), expected), f"step {index}"
    assert np.array_equal(torch.stack(simulation.residuals()).numpy(), by_hand.memories)
    assert blocks_of(simulation) == [by_hand.lengths] * world_size
    evenly = [1024 // world_size + (part < 1024 % world_size) for part in range(world_size)]
    assert by_hand.lengths != evenly or world_size == 1 or numel == 601


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_published_foresees_what_each_move_changes(world_size: int) -> None:
    """Blocks so dense that a move, as foreseen, decides about the next border."""
    numel, num_blocks, k = 2060, 64, 412
    by_hand = PublishedByHand(numel, world_size, k, num_blocks)
    selector = ExDyna(rule="published", num_blocks=num_blocks)
    randomness = np.random.default_rng(world_size)
    simulation = build(selector, numel, world_size, k / numel)
    for index in range(40):
        grads = (0.02 * randomness.standard_normal((world_size, numel))).astype(np.float32)
        expected = by_hand.step(grads)
        got = simulation.step(torch.from_numpy(grads))
        assert np.array_equal(got.update.numpy(), expected), f"step {index}"
        assert blocks_of(simulation) == [by_hand.lengths] * world_size, f"step {index}"


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


@pytest.mark.parametrize(
    ("numel", "num_blocks", "block_size"),
    [(1, 1, 1), (257, 257, 1), (2000, 1000, 2), (31 * 1024, 1024, 31), (32 * 1024, 1024, 32), (40_000, 625, 64)],
)
def test_repaired_has_blocks_of_equal_length_for_any_vector(numel: int, num_blocks: int, block_size: int) -> None:
    grid = ExDyna().balance.grid(numel, 1024, 32)
    assert (grid.num_blocks, grid.block_size) == (num_blocks, block_size)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rule": "agreed"}, "rule of exdyna must be one of repaired, published, got 'agreed'"),
        ({"num_blocks": 0}, "num_blocks of exdyna must be at least 1, got 0"),
        ({"tolerance": 1.0}, "tolerance of exdyna must be above 1, got 1.0"),
        ({"smallest_share": -0.1}, r"smallest_share of exdyna must be in \[0, 1\], got -0.1"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExDyna(**settings)
