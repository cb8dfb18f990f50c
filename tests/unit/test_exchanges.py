"""Exchanges and codecs against brute force, element by element, on simulated ranks."""

import numpy as np
import pytest
import torch
from torch import Tensor

import micro
from micro.codecs.raw import Raw
from micro.exchanges.base import Wire
from micro.sparse import Exchanged, Overlap, SparseValues
from tests.exchanging import exchanged

NUMEL = 40
LARGEST_HALF = 65504.0
WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])


def accumulators(world_size: int, scale: float = 1.0) -> Tensor:
    randomness = torch.Generator().manual_seed(world_size)
    return scale * torch.randn(world_size, NUMEL, generator=randomness, dtype=torch.float64)


def choices(world_size: int, overlap: Overlap) -> list[list[int]]:
    """Return ascending indices per rank, of different lengths, some empty, that overlap as they are said to."""
    if overlap is Overlap.SAME:
        return [[1, 4, 5, 20, 39]] * world_size
    if overlap is Overlap.LEADER:
        return [[1, 4, 5, 20, 39] if rank == world_size // 2 else [] for rank in range(world_size)]
    if overlap is Overlap.DISJOINT:
        return [list(range(rank, NUMEL - 8 * rank, world_size)) if rank != 1 else [] for rank in range(world_size)]
    return [list(range(rank % 3, 5 + 4 * rank, 2)) if rank != 2 else [] for rank in range(world_size)]


def exchange(
    kind: micro.Exchange,
    codec: micro.Codec,
    acc: Tensor,
    chosen: list[list[int]],
    overlap: Overlap,
    *,
    is_finite: tuple[bool, ...] | None = None,
    say_counts: bool = False,
) -> list[Exchanged]:
    counts = tuple(map(len, chosen)) if say_counts else None
    bad = is_finite.index(False) if is_finite and False in is_finite else None
    before = acc.clone()
    results, _ = exchanged(kind, acc, chosen, wire=Wire(codec), overlap=overlap, bad_rank=bad, counts=counts)
    assert torch.equal(acc, before), "an exchange must not change the accumulator"
    return results


def dense(parts: tuple[SparseValues, ...]) -> Tensor:
    vector = torch.zeros(NUMEL, dtype=torch.float64)
    for part in parts:
        part.add_to_(vector)
    return vector


def sent(results: list[Exchanged]) -> Tensor:
    return torch.stack([dense((result.sent,)) for result in results])


def union_of(chosen: list[list[int]]) -> list[int]:
    return sorted({index for indices in chosen for index in indices})


def assert_exchanged(results: list[Exchanged], chosen: list[list[int]], update: Tensor, contributed: Tensor) -> None:
    for result in results:
        assert torch.equal(dense(result.update), dense(results[0].update))
        assert result.counts == tuple(map(len, chosen))
        assert result.num_updated == len(union_of(chosen))
        assert result.is_finite
    torch.testing.assert_close(dense(results[0].update), update, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(sent(results), contributed, rtol=0, atol=0)


@WORLDS
@pytest.mark.parametrize("overlap", Overlap)
def test_union_averages_all_ranks_at_every_chosen_index(world_size: int, overlap: Overlap) -> None:
    acc, chosen = accumulators(world_size), choices(world_size, overlap)
    update, contributed = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros_like(acc)
    for index in union_of(chosen):
        update[index] = sum(acc[rank, index] for rank in range(world_size)) / world_size
        contributed[:, index] = acc[:, index]
    # Where all hold the same, the lists need not be known: the counts say who chose them.
    results = exchange(micro.Union(), Raw(), acc, chosen, overlap, say_counts=overlap in (Overlap.SAME, Overlap.LEADER))
    assert_exchanged(results, chosen, update, contributed)


@WORLDS
@pytest.mark.parametrize("overlap", [Overlap.ANY, Overlap.DISJOINT])
def test_gather_adds_what_each_rank_chose(world_size: int, overlap: Overlap) -> None:
    acc, chosen = accumulators(world_size), choices(world_size, overlap)
    update, contributed = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros_like(acc)
    for rank, indices in enumerate(chosen):
        for index in indices:
            update[index] += acc[rank, index] / world_size
            contributed[rank, index] = acc[rank, index]
    results = exchange(micro.Gather(), Raw(), acc, chosen, overlap)
    assert_exchanged(results, chosen, update, contributed)


def halves(x: np.ndarray) -> np.ndarray:
    """Round to half precision, cut at its largest number, and back: numpy's own rounding, not torch's."""
    return np.clip(x, -LARGEST_HALF, LARGEST_HALF).astype(np.float16).astype(np.float64)


SCALES = pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-7, 1e-12, 1e4, 1e5, 1e9])


@WORLDS
@SCALES
def test_half_gather_sends_the_rounded_values(world_size: int, scale: float) -> None:
    acc, chosen = accumulators(world_size, scale), choices(world_size, Overlap.ANY)
    update, contributed = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros_like(acc)
    for rank, indices in enumerate(chosen):
        rounded = torch.from_numpy(halves(acc[rank, indices].numpy()))
        contributed[rank, indices] = rounded
        update[indices] += rounded / world_size
    results = exchange(micro.Gather(), micro.Half(), acc, chosen, Overlap.ANY)
    assert_exchanged(results, chosen, update, contributed)


@WORLDS
@SCALES
def test_half_union_sends_the_rounded_mean_of_the_owners_values_and_the_others_rounded_ones(
    world_size: int, scale: float
) -> None:
    acc, chosen = accumulators(world_size, scale), choices(world_size, Overlap.ANY)
    indices = union_of(chosen)
    wire = halves(acc[:, indices].numpy())
    shares = [len(indices) // world_size + (rank < len(indices) % world_size) for rank in range(world_size)]
    owners = np.repeat(np.arange(world_size), shares)
    added = np.where(np.arange(world_size)[:, None] == owners, acc[:, indices].numpy(), wire)
    mean = halves(added.sum(0) / world_size)
    results = exchange(micro.Union(), micro.Half(), acc, chosen, Overlap.ANY)

    update = torch.zeros(NUMEL, dtype=torch.float64)
    update[indices] = torch.from_numpy(mean)
    for result in results:
        assert torch.equal(dense(result.update), update)
    # What travels is booked as it was rounded; the owner books its value as it is, less what the mean's rounding left.
    booked = sent(results)[:, indices].numpy()
    tolerance = 1e-15 * np.abs(added).max()
    for rank in range(world_size):
        own = owners == rank
        assert np.array_equal(booked[rank, ~own], wire[rank, ~own])
        rounding = (added.sum(0) - world_size * mean)[own]
        np.testing.assert_allclose(booked[rank, own], added[rank, own] - rounding, rtol=0, atol=tolerance)
    np.testing.assert_allclose(booked.sum(0), world_size * mean, rtol=1e-15, atol=tolerance)


@pytest.mark.parametrize("kind", [micro.Union(), micro.Gather()], ids=lambda kind: kind.name)
def test_what_half_precision_cuts_off_stays_in_the_residual(kind: micro.Exchange) -> None:
    world_size, layout = 2, micro.Layout.flat(4)
    reducer = micro.SparseReducer(micro.TopK(), 1.0, exchange=kind, codec=micro.Half())
    simulation = micro.Simulation(reducer, layout, world_size, dtype=torch.float64)
    grads = torch.tensor([[1e6, -1e6, 1.0 + 2**-12, 1e-9], [1e6, 1e6, 1.0, 1e-9]], dtype=torch.float64)
    first = simulation.step(grads, residuals=True)
    uneven = -LARGEST_HALF if kind.name == "union" else 0.0  # one rank owns the element, and its own value is not cut
    assert first.update.tolist() == [LARGEST_HALF, uneven, 1.0, 0.0]
    assert first.residuals is not None
    assert first.residuals.sum(0).tolist() == [2e6 - 2 * LARGEST_HALF, -2 * uneven, 2**-12, 2e-9]
    applied = first.update.clone()
    for _ in range(20):  # nothing new comes in: what was cut follows later
        applied += simulation.step(torch.zeros_like(grads)).update
    simulation.close()
    torch.testing.assert_close(applied[:3], grads.mean(0)[:3], rtol=1e-3, atol=1e-3)


def test_sparse_values_add_with_a_factor() -> None:
    vector = torch.ones(5)
    SparseValues(torch.tensor([0, 4], dtype=torch.int32), torch.tensor([2.0, 3.0], dtype=torch.float64)).add_to_(
        vector, alpha=-2.0
    )
    assert vector.tolist() == [-3.0, 1.0, 1.0, 1.0, -5.0]
