"""DEFT: the published rule step for step against a re-write of its own, the repaired one against brute force."""

import math
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import micro
from micro.selectors.pieces import largest_of_each, pieces_at
from micro.zoo.deft import layer_pieces, share_out

Numels = tuple[int, ...]
SMALL: Numels = (700, 64, 5, 1, 1203, 33, 300, 2)
LARGE: Numels = (30_000, 20_000, 64, 9_000, 3, 10_933)


def layout_of(numels: Numels) -> micro.Layout:
    return micro.Layout(tuple(f"layer{i}" for i in range(len(numels))), tuple((numel,) for numel in numels))


def build(rule: Any, numels: Numels, world_size: int, density: float) -> micro.Simulation:
    return micro.Simulation(
        micro.SparseReducer(micro.build(micro.Selector, {"name": "deft", "rule": rule}), density),
        layout_of(numels),
        world_size,
    )


def draw(numels: Numels, world_size: int, step: int) -> Tensor:
    """Return (world_size, numel) gradients whose layers differ in scale; short ones weigh most."""
    randomness = torch.Generator().manual_seed(step)
    grads = torch.randn(world_size, sum(numels), generator=randomness)
    scales = torch.tensor([20.0 if numel < 10 else 1 + 3 * (i % 2) for i, numel in enumerate(numels)])
    return grads * scales.repeat_interleave(torch.tensor(numels))


# --- published: the authors' code as described, in numpy and single precision ----------------------------------------


@dataclass
class PublishedByHand:
    """n workers of the authors' code, one after the other; where it fails, what we do."""

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
            if size > numel / self.n:
                quotient, remainder = size // self.n, size % self.n
                for piece in range(self.n):
                    length = quotient + 1 if piece < remainder else quotient
                    self.layers.append((at, at + length))
                    at += length
            else:
                self.layers.append((at, at + size))
                at += size

    def step(self, grads: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the aggregated gradient and the number of indices in it."""
        self.t += 1
        acc = self.memories + grads
        numbers = [self.allocate(acc[rank]) for rank in range(self.n)]
        bins, common = self.pack(numbers[self.t % self.n])
        chosen: list[int] = []
        for rank in range(self.n):
            for layer in bins[(self.t % self.n + rank) % self.n]:
                chosen += self.top(acc[rank], layer, numbers[rank][layer])
        for layer in common:
            chosen += range(*self.layers[layer])
        self.num_common += len(common)
        self.num_differing += any(number != numbers[0] for number in numbers)
        everyone = np.array(chosen, np.int64)
        summed = np.zeros(len(everyone), np.float32)
        for rank in range(self.n):
            summed = summed + acc[rank, everyone]
        aggregated = np.zeros(acc.shape[1], np.float32)
        aggregated[everyone] = summed / np.float32(self.n)
        acc[:, everyone] = 0
        self.memories = acc
        return aggregated, len(everyone)

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

    def top(self, acc: np.ndarray, layer: int, k: int) -> list[int]:
        start, stop = self.layers[layer]
        order = np.argsort(-np.abs(acc[start:stop]), kind="stable")
        return [start + int(place) for place in order[:k]]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("numels", "density"), [(SMALL, 0.1), (SMALL, 0.002), (LARGE, 0.01)])
def test_published_is_the_authors_code_step_for_step(world_size: int, numels: Numels, density: float) -> None:
    by_hand = PublishedByHand(numels, world_size, int(density * sum(numels)))
    with closing(build("published", numels, world_size, density)) as simulation:
        for index in range(32 if numels == SMALL else 4):
            grads = draw(numels, world_size, index)
            expected, count = by_hand.step(grads.numpy())
            got = simulation.step(grads)
            assert got.stats[0].global_count == sum(got.stats[0].counts) == count, f"step {index}"
            assert np.array_equal(got.update.numpy(), expected), f"step {index}"
        assert np.array_equal(torch.stack(simulation.residuals()).numpy(), by_hand.memories)
    assert by_hand.num_common > 0
    assert by_hand.num_differing > 0 or world_size == 1 or density == 0.002


def test_published_sends_wholly_wanted_layers_on_one_rank_too() -> None:
    with closing(build("published", SMALL, 1, 0.1)) as simulation:
        update = simulation.step(draw(SMALL, 1, 0)).update
    assert update[764:770].all()  # the layers of 5 and of 1


def test_published_takes_at_least_one_of_each_layer() -> None:
    with closing(build("published", SMALL, 2, 0.001)) as simulation:
        stats = simulation.step(draw(SMALL, 2, 0)).stats[0]
    assert stats.target_count == 2
    assert stats.global_count == 9  # the longest layer is cut in two


# --- pieces -----------------------------------------------------------------------------------------------------------


def test_only_layers_longer_than_a_share_are_cut() -> None:
    assert layer_pieces((5, 12, 7), 2) == ((0, 5), (5, 17), (17, 24))  # 12 is a share, not more
    assert layer_pieces((5, 13, 6), 2) == ((0, 5), (5, 12), (12, 18), (18, 24))
    assert layer_pieces((3,), 5) == ((0, 1), (1, 2), (2, 3))
    assert layer_pieces((4, 0, 4), 1) == ((0, 4), (4, 8))


@pytest.mark.parametrize("numels", [SMALL, LARGE, (1,), (2, 1)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_pieces_cover_everything_once(numels: Numels, world_size: int) -> None:
    covered = [place for start, stop in layer_pieces(numels, world_size) for place in range(start, stop)]
    assert covered == list(range(sum(numels)))


# --- how many of each -------------------------------------------------------------------------------------------------


def test_shares_go_by_norm_when_there_is_room() -> None:
    assert share_out(100, [1.0, 2.0, 7.0], [1000, 1000, 1000]) == [10, 20, 70]


def test_what_full_pieces_leave_over_goes_to_the_others() -> None:
    assert share_out(100, [90.0, 5.0, 5.0], [10, 1000, 1000]) == [10, 45, 45]
    assert share_out(100, [5.0, 90.0, 0.0], [1000, 60, 7]) == [40, 60, 0]
    assert share_out(20, [1.0, 100.0, 0.0], [4, 9, 7]) == [4, 9, 7]


@pytest.mark.parametrize("norms", [[0.0, 0.0, 0.0], [math.inf, 1.0, 0.0]])
def test_norms_that_say_nothing_are_replaced_by_lengths(norms: list[float]) -> None:
    assert share_out(10, norms, [50, 30, 20]) == [5, 3, 2]


@pytest.mark.parametrize("seed", range(30))
def test_shares_are_exactly_the_budget_and_fit(seed: int) -> None:
    randomness = np.random.default_rng(seed)
    sizes = [int(size) for size in randomness.integers(1, 50, 12)]
    norms = [float(norm) for norm in np.exp(5 * randomness.standard_normal(12)) * randomness.integers(0, 2, 12)]
    for budget in (1, 5, sum(sizes) // 2, sum(sizes)):
        taken = share_out(budget, norms, sizes)
        assert sum(taken) == budget
        assert all(0 <= count <= size for count, size in zip(taken, sizes, strict=True))
        room = sum(size for size, norm in zip(sizes, norms, strict=True) if norm)
        assert room < budget or not any(count for count, norm in zip(taken, norms, strict=True) if not norm)


# --- the largest of each piece ----------------------------------------------------------------------------------------


def brute_largest(acc: Tensor, pieces: list[tuple[int, int]], wanted: list[int]) -> list[int]:
    values, chosen = acc.abs().tolist(), []
    for (start, stop), k in zip(pieces, wanted, strict=True):
        chosen += sorted(range(start, stop), key=lambda place: (-values[place], place))[:k]
    return sorted(chosen)


def dispersed(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


VECTORS = {
    "normal": dispersed,
    "single": lambda numel, seed: dispersed(numel, seed).float(),
    "few values": lambda numel, seed: dispersed(numel, seed).round(),
    "tied": lambda numel, _seed: torch.ones(numel),
    "zero": lambda numel, _seed: torch.zeros(numel),
    "tiny": lambda numel, seed: dispersed(numel, seed).float() * 1e-41,
    "mostly zero": lambda numel, seed: dispersed(numel, seed) * (torch.arange(numel) % 9 == seed),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("seed", range(3))
def test_largest_of_each_is_brute_force(kind: str, seed: int) -> None:
    acc = VECTORS[kind](9000, seed)
    kept = acc.clone()
    pieces = [(0, 3000), (3010, 3011), (3011, 3500), (5000, 9000)]
    for wanted in ([1, 1, 1, 1], [30, 1, 489, 4], [2999, 1, 77, 900], [3000, 1, 489, 4000]):
        indices = largest_of_each(acc, pieces_at(tuple(pieces)), wanted)
        assert indices.dtype == torch.int32
        assert indices.tolist() == brute_largest(acc, pieces, wanted)
    assert torch.equal(acc, kept)
    assert largest_of_each(acc, pieces_at(()), []).tolist() == []


# --- repaired ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("density", [0.5, 0.1, 0.002])
def test_repaired_takes_the_largest_of_each_piece_by_the_rank_that_serves_it(world_size: int, density: float) -> None:
    pieces = layer_pieces(SMALL, world_size)
    with closing(build("repaired", SMALL, world_size, density)) as simulation:
        for index in range(10):
            grads = draw(SMALL, world_size, index)
            acc = torch.stack(simulation.residuals()) + grads
            stats = simulation.step_(grads)[0]
            updated = grads[0].nonzero().view(-1).tolist()
            norms = sum(torch.stack([part.norm() for part in row.split([b - a for a, b in pieces])]) for row in acc)
            assert isinstance(norms, Tensor)
            wanted = share_out(stats.target_count, norms.tolist(), [b - a for a, b in pieces])
            assert stats.global_count == sum(stats.counts) == len(updated) == int(density * sum(SMALL))
            for piece, k in zip(pieces, wanted, strict=True):
                inside = [place for place in updated if piece[0] <= place < piece[1]]
                by_rank = [brute_largest(acc[rank], [piece], [k]) for rank in range(world_size)]
                assert inside in by_rank


def test_repaired_packs_so_that_no_rank_searches_much_more_than_its_share() -> None:
    numels = tuple(100 + 37 * i % 1000 for i in range(60))
    world_size, searched = 4, []
    with closing(build("repaired", numels, world_size, 0.01)) as simulation:
        acc = draw(numels, world_size, 0)
        searched = list(simulation.step(acc).stats[0].counts)
    assert sum(searched) == int(0.01 * sum(numels))
    assert max(searched) < 1.5 * sum(searched) / world_size


def test_repaired_rotates_bins_so_that_another_rank_serves_a_piece_next() -> None:
    numels, counts = (8, 900), []
    grads = torch.zeros(2, 908)
    grads[:, :8] = 1.0
    grads[:, 8:] = 1e-3
    with closing(build("repaired", numels, 2, 8 / 908)) as simulation:
        counts = [simulation.step(grads - torch.stack(simulation.residuals())).stats[0].counts for _ in range(3)]
    assert counts[0] == counts[1][::-1] == counts[2]


def test_rule_is_checked() -> None:
    with pytest.raises(ValueError, match="rule of deft must be one of repaired, published, got 'agreed'"):
        micro.build(micro.Selector, {"name": "deft", "rule": "agreed"})
