"""Exchanges against brute force, element by element, on simulated ranks, with codecs."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

import micro
from micro.comm.ranks import Traffic
from micro.exchanges.base import Wire
from micro.kernels import largest
from micro.values.sparse import Exchanged, Overlap
from tests.exchanging import exchanged
from tests.parts import dense, normal, places, simulated
from tests.products import grid
from tests.sizes import gathered

NUMEL, LARGEST_HALF = 40, 65504.0
WORLDS = [1, 2, 3, 5, 8]


@dataclass(frozen=True)
class Given:
    """What each rank has chosen of its accumulator (numel,)."""

    acc: Tensor
    chosen: list[list[int]]

    @property
    def world_size(self) -> int:
        return len(self.chosen)

    def at(self, rank: int, values: Tensor | None = None) -> Tensor:
        """Return (numel,) what a rank has at its choice, zero elsewhere."""
        vector = torch.zeros_like(self.acc[rank])
        vector[self.chosen[rank]] = (self.acc if values is None else values)[rank, self.chosen[rank]]
        return vector


def given(world_size: int, overlap: Overlap, *, scale: float = 1.0) -> Given:
    """Return selections of different lengths, some empty, with the given overlap."""
    ranks = range(world_size)
    chosen = {
        Overlap.SAME: [[1, 4, 5, 20, 38]] * world_size,
        Overlap.LEADER: [[1, 4, 5, 20, 38] if rank == world_size // 2 else [] for rank in ranks],
        Overlap.DISJOINT: [list(range(rank, NUMEL - 8 * rank, world_size)) if rank != 1 else [] for rank in ranks],
        Overlap.ANY: [list(range(rank % 3, 5 + 4 * rank, 2)) if rank != 2 else [] for rank in ranks],
    }[overlap]
    return Given(scale * normal(world_size, NUMEL, seed=world_size), chosen)


def quarters(world_size: int, numel: int, share: float) -> Given:
    """Return quarters, none zero: sums are exact in any order, and ties are many; rank 1 has chosen nothing."""
    randomness = torch.Generator().manual_seed(numel + world_size)
    acc = torch.randint(1, 9, (world_size, numel), generator=randomness).double() / 4
    drawn = torch.rand(world_size, numel, generator=randomness) < share
    chosen = [places(row) if rank != 1 else [] for rank, row in enumerate(drawn)]
    return Given(acc * torch.where(torch.arange(numel) % 3 == 0, -1.0, 1.0), chosen)


def run(
    kind: micro.Exchange, case: Given, overlap: Overlap = Overlap.ANY, *, wire: Wire | None = None
) -> tuple[list[Exchanged], list[Traffic]]:
    counts = tuple(map(len, case.chosen)) if overlap in (Overlap.SAME, Overlap.LEADER) else None
    before = case.acc.clone()
    found = exchanged(kind, case.acc, case.chosen, wire=wire, overlap=overlap, counts=counts)
    assert torch.equal(case.acc, before), "an exchange must not change the accumulator"
    return found


def assert_exchanged(results: list[Exchanged], case: Given, update: Tensor, sent: list[Tensor]) -> None:
    facts = tuple(map(len, case.chosen)), len(set().union(*case.chosen)), True
    first = dense(NUMEL, *results[0].update)
    for result, own in zip(results, sent, strict=True):
        assert torch.equal(dense(NUMEL, *result.update), first), "replicas drift apart"
        assert (result.counts, result.num_updated, result.is_finite) == facts
        assert torch.equal(dense(NUMEL, result.sent), own)
    torch.testing.assert_close(first, update, rtol=1e-14, atol=1e-15)


@grid(kind=[micro.Union(), micro.Gather(), micro.DSA()], world_size=WORLDS, overlap=Overlap)
def test_an_index_gets_the_mean_of_all_ranks_or_of_those_that_chose_it(
    kind: micro.Exchange, world_size: int, overlap: Overlap
) -> None:
    if overlap not in kind.accepts:
        return
    case = given(world_size, overlap)
    senders = case if kind.name != "union" else Given(case.acc, [sorted(set().union(*case.chosen))] * world_size)
    sent = list(map(senders.at, range(world_size)))
    assert_exchanged(run(kind, case, overlap)[0], case, torch.stack(sent).sum(0) / world_size, sent)


# --- gather's other rules ---------------------------------------------------------------------------------------------


@grid(world_size=range(1, 10), share=[0.1, 0.5, 0.9])
def test_published_slices_forget_who_sent_what(world_size: int, share: float) -> None:
    """Pairs are cut into equal slices; of one that comes twice in a slice the last counts; the rest is dropped."""
    case = quarters(world_size, 12, share)
    pairs = [(i, case.acc[rank, i].item() / world_size) for rank, own in enumerate(case.chosen) for i in own]
    size, expected, updated = len(pairs) // world_size, [0.0] * 12, set()
    for part in range(world_size):
        last = dict(pairs[part * size : (part + 1) * size])
        for index, value in last.items():
            expected[index] += value
        updated |= set(last)
    for rank, got in enumerate(run(micro.Gather(rule="published"), case)[0]):
        assert dense(12, *got.update).tolist() == pytest.approx(expected, rel=1e-12)
        assert (got.num_updated, got.counts) == (len(updated), tuple(map(len, case.chosen)))
        assert torch.equal(dense(12, got.sent), case.at(rank))  # all has left the residual


def test_the_mean_may_be_over_those_who_sent() -> None:
    grads = normal(4, 30)
    senders = simulated(micro.TopK(), 30, 4, density=0.2, exchange=micro.Gather(rule="senders"))
    update, chosen = senders.step(grads).update, [set(largest(row, 6).tolist()) for row in grads]
    for place in range(30):
        sent = [float(grads[rank, place]) for rank in range(4) if place in chosen[rank]]
        assert float(update[place]) == pytest.approx(sum(sent) / max(len(sent), 1))


# --- half precision ---------------------------------------------------------------------------------------------------


def halves(x: np.ndarray) -> np.ndarray:
    """Round to half precision, cut at its largest number, and back: numpy's own rounding, not torch's."""
    return np.clip(x, -LARGEST_HALF, LARGEST_HALF).astype(np.float16).astype(np.float64)


@grid(world_size=WORLDS, scale=[1.0, 1e-3, 1e-7, 1e-12, 1e5, 1e9])
def test_half_precision_sends_rounded_values_and_books_what_it_sends(world_size: int, scale: float) -> None:
    case = given(world_size, Overlap.ANY, scale=scale)
    wire = halves(case.acc.numpy())
    rounded = [case.at(rank, torch.from_numpy(wire)) for rank in range(world_size)]
    results, _ = run(micro.Gather(), case, wire=Wire(micro.Half()))
    assert_exchanged(results, case, sum(vector / world_size for vector in rounded), rounded)

    indices = sorted(set().union(*case.chosen))  # a union: each rank owns a share, and adds its own values as they are
    shares = [len(indices) // world_size + (rank < len(indices) % world_size) for rank in range(world_size)]
    owners = np.repeat(np.arange(world_size), shares)
    added = np.where(np.arange(world_size)[:, None] == owners, case.acc[:, indices].numpy(), wire[:, indices])
    mean = halves(added.sum(0) / world_size)
    results, _ = run(micro.Union(), case, wire=Wire(micro.Half()))
    for rank, result in enumerate(results):
        assert np.array_equal(dense(NUMEL, *result.update)[indices].numpy(), mean)
        booked, lost = dense(NUMEL, result.sent)[indices].numpy(), added.sum(0) - world_size * mean
        expected = np.where(owners == rank, added[rank] - lost, wire[rank, indices])
        np.testing.assert_allclose(booked, expected, rtol=0, atol=1e-15 * np.abs(added).max())


# --- DSA --------------------------------------------------------------------------------------------------------------


@grid(
    world_size=range(1, 8), rule=["repaired", "published"], case=[(24, 0.05), (24, 0.3), (24, 0.9), (5, 0.5), (1, 0.9)]
)
def test_dsa_sends_sums_as_pairs_or_dense(world_size: int, rule: str, case: tuple[int, float]) -> None:
    numel, data = case[0], quarters(world_size, *case)
    results, traffics = run(micro.build(micro.Exchange, {"name": "dsa", "rule": rule}), data)
    regions = [numel // world_size + (rank < numel % world_size) for rank in range(world_size)]
    owner_of = [rank for rank in range(world_size) for _ in range(regions[rank])]
    total, leaving = dict[int, float](), [0] * world_size
    for rank, own in enumerate(data.chosen):
        smallest = min((float(data.acc[rank, index].abs()) for index in own), default=0.0)
        for index in own:  # published: the smallest, and ties, are lost
            if rule == "repaired" or abs(data.acc[rank, index]) > smallest:
                total[index] = total.get(index, 0.0) + float(data.acc[rank, index])
                leaving[rank] += owner_of[index] != rank
    is_dense = 3 * len(total) >= numel if rule == "published" else 8 * numel < 12 * len(total)
    held = [sum(owner_of[index] == rank for index in total) for rank in range(world_size)]
    for rank, (got, traffic) in enumerate(zip(results, traffics, strict=True)):
        assert dense(numel, *got.update).tolist() == [total.get(i, 0.0) / world_size for i in range(numel)]
        assert torch.equal(dense(numel, got.sent), data.at(rank))
        assert got.num_updated == (sum(map(bool, total.values())) if is_dense else len(total))
        assert traffic.num_bytes == {
            "counts": 16 * (world_size - 1),
            "indices": 4 * leaving[rank] + (0 if is_dense else gathered([4 * count for count in held], rank)),
            "values": 8 * leaving[rank] + gathered([8 * count for count in (regions if is_dense else held)], rank),
        }
