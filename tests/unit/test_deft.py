"""DEFT: the published rule step for step against a re-write of its own, the repaired one against brute force."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import micro
from micro.zoo.deft import Deft, layer_pieces, share_out
from tests.parts import exactly, kept, places, simulated

Numels = tuple[int, ...]
SMALL: Numels = (700, 64, 5, 1, 1203, 33, 300, 2)
LARGE: Numels = (30_000, 20_000, 64, 9_000, 3, 10_933)


def build(rule: Any, numels: Numels, world_size: int, density: float) -> micro.Simulation:
    layout = micro.Layout(tuple(f"layer{i}" for i in range(len(numels))), tuple((numel,) for numel in numels))
    return simulated(Deft(rule=rule), layout, world_size, density=density, dtype=torch.float32)


def draw(numels: Numels, world_size: int, step: int) -> Tensor:
    """Return (world_size, numel) gradients whose layers differ in scale; short ones weigh most."""
    grads = torch.randn(world_size, sum(numels), generator=torch.Generator().manual_seed(step))
    scales = torch.tensor([20.0 if numel < 10 else 1 + 3 * (i % 2) for i, numel in enumerate(numels)])
    return grads * scales.repeat_interleave(torch.tensor(numels))


@dataclass
class PublishedByHand:
    """n workers of the authors' code as described, in numpy and single precision; where it fails, what we do."""

    numels: Numels
    n: int
    k: int
    t: int = -1
    num_common: int = 0
    num_differing: int = 0
    layers: list[tuple[int, int]] = field(default_factory=list)
    memories: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        numel, at = sum(self.numels), 0
        self.memories = np.zeros((self.n, numel), np.float32)
        for size in self.numels:
            pieces = self.n if size > numel / self.n else 1
            for piece in range(pieces):
                length = size // pieces + (piece < size % pieces)
                self.layers.append((at, at + length))
                at += length

    def step(self, grads: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the aggregated gradient and the number of indices in it."""
        self.t += 1
        acc = self.memories + grads
        numbers = [self.allocate(acc[rank]) for rank in range(self.n)]
        bins, common = self.pack(numbers[self.t % self.n])
        chosen: list[int] = []
        for rank in range(self.n):
            for layer in bins[(self.t % self.n + rank) % self.n]:
                start, stop = self.layers[layer]
                order = np.argsort(-np.abs(acc[rank, start:stop]), kind="stable")
                chosen += [start + int(place) for place in order[: numbers[rank][layer]]]
        for layer in common:
            chosen += range(*self.layers[layer])
        self.num_common += len(common)
        self.num_differing += any(number != numbers[0] for number in numbers)
        summed = np.zeros(len(chosen), np.float32)
        for rank in range(self.n):
            summed = summed + acc[rank, chosen]
        aggregated = np.zeros(acc.shape[1], np.float32)
        aggregated[chosen] = summed / np.float32(self.n)
        acc[:, chosen] = 0
        self.memories = acc
        return aggregated, len(chosen)

    def allocate(self, acc: np.ndarray) -> list[int]:
        # the norms as torch gives them: their last bit can decide a floor
        norms = [float(torch.linalg.vector_norm(torch.from_numpy(acc[start:stop]))) for start, stop in self.layers]
        budget, total, numbers = self.k, sum(norms), [0] * len(norms)
        for layer in reversed(np.argsort(norms, kind="stable").tolist()):
            size = self.layers[layer][1] - self.layers[layer][0]
            y = math.floor(budget * (norms[layer] / total)) if total > 0 else 0
            numbers[layer] = size if size < y else max(1, y)
            budget -= numbers[layer]
            total -= norms[layer]
        return numbers

    def pack(self, numbers: list[int]) -> tuple[list[list[int]], list[int]]:
        sizes = [stop - start for start, stop in self.layers]
        costs = [size * math.log2(k) if k > 1 else float(size) for size, k in zip(sizes, numbers, strict=True)]
        bins: list[list[int]] = [[] for _ in range(self.n)]
        loads, common = [0.0] * self.n, []
        for _ in sizes:
            dearest = costs.index(max(costs))
            if numbers[dearest] == sizes[dearest]:
                common.append(dearest)
            else:
                emptiest = loads.index(min(loads))
                bins[emptiest].append(dearest)
                loads[emptiest] += costs[dearest]
            costs[dearest] = -1.0
        return bins, common


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(("numels", "density"), [(SMALL, 0.1), (SMALL, 0.002), (LARGE, 0.01)])
def test_published_is_the_authors_code_step_for_step(world_size: int, numels: Numels, density: float) -> None:
    by_hand = PublishedByHand(numels, world_size, int(density * sum(numels)))
    simulation = build("published", numels, world_size, density)
    for index in range(20 if numels == SMALL else 4):
        grads = draw(numels, world_size, index)
        expected, count = by_hand.step(grads.numpy())
        got = simulation.step(grads)
        assert got.stats[0].global_count == sum(got.stats[0].counts) == count
        assert np.array_equal(got.update.numpy(), expected)
    assert np.array_equal(kept(simulation).numpy(), by_hand.memories)
    assert by_hand.num_common > 0
    assert by_hand.num_differing > 0 or world_size == 1 or density == 0.002


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


@pytest.mark.parametrize("seed", range(10))
def test_shares_are_exactly_the_budget_and_fit(seed: int) -> None:
    randomness = np.random.default_rng(seed)
    sizes = [int(size) for size in randomness.integers(1, 50, 12)]
    norms = [float(norm) for norm in np.exp(5 * randomness.standard_normal(12)) * randomness.integers(0, 2, 12)]
    room = sum(size for size, norm in zip(sizes, norms, strict=True) if norm)
    for budget in (1, 5, sum(sizes) // 2, sum(sizes)):
        taken = share_out(budget, norms, sizes)
        assert sum(taken) == budget
        assert all(0 <= count <= size for count, size in zip(taken, sizes, strict=True))
        assert room < budget or not any(count for count, norm in zip(taken, norms, strict=True) if not norm)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "density"), [(1, 0.1), (3, 0.5), (3, 0.002), (8, 0.1)])
def test_repaired_takes_the_largest_of_each_piece_by_the_rank_that_serves_it(world_size: int, density: float) -> None:
    pieces, simulation = layer_pieces(SMALL, world_size), build("repaired", SMALL, world_size, density)
    sizes = [stop - start for start, stop in pieces]
    for index in range(10):
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
    searched = build("repaired", numels, 4, 0.01).step(draw(numels, 4, 0)).stats[0].counts
    assert sum(searched) == int(0.01 * sum(numels))
    assert max(searched) < 1.5 * sum(searched) / 4
    simulation, acc = build("repaired", (8, 900), 2, 8 / 908), torch.where(torch.arange(908) < 8, 1.0, 1e-3)
    counts = [exactly(simulation, acc.expand(2, -1)).stats[0].counts for _ in range(3)]
    assert counts[0] == counts[1][::-1] == counts[2]
