"""DSA against plain dictionaries: its update, what leaves the residuals, and when regions travel dense."""

import pytest
import torch
from torch import Tensor

import micro
from micro.comm import Traffic
from micro.exchanges.base import Wire
from micro.sparse import Exchanged, Overlap, SparseValues
from tests.exchanging import exchanged
from tests.sizes import gathered

NUMEL = 24
WORLDS = pytest.mark.parametrize("world_size", range(1, 10))
RULES = pytest.mark.parametrize("rule", ["repaired", "published"])


def accumulators(world_size: int, numel: int = NUMEL) -> Tensor:
    """Return (world_size, numel) quarters, none zero: sums are exact in any order, and ties are many."""
    drawn = torch.randint(1, 9, (world_size, numel), generator=torch.Generator().manual_seed(world_size)).double() / 4
    return drawn * torch.where(torch.arange(numel) % 3 == 0, -1.0, 1.0)


def some(world_size: int, numel: int, share: float) -> list[list[int]]:
    """Return ascending indices per rank, about a share of all; rank 1 has none."""
    drawn = torch.rand(world_size, numel, generator=torch.Generator().manual_seed(numel + world_size)) < share
    return [torch.nonzero(row).view(-1).tolist() if rank != 1 else [] for rank, row in enumerate(drawn)]


def exchange(
    acc: Tensor,
    chosen: list[list[int]],
    rule: str = "repaired",
    *,
    wire: Wire | None = None,
    bad_rank: int | None = None,
    overlap: Overlap = Overlap.ANY,
) -> tuple[list[Exchanged], list[Traffic]]:
    part = micro.build(micro.Exchange, {"name": "dsa", "rule": rule})
    return exchanged(part, acc, chosen, wire=wire, bad_rank=bad_rank, overlap=overlap)


def dense(numel: int, *parts: SparseValues) -> list[float]:
    vector = torch.zeros(numel, dtype=torch.float64)
    for part in parts:
        assert part.indices.dtype == torch.int32
        assert part.indices.tolist() == sorted(set(part.indices.tolist()))
        part.add_to_(vector)
    return vector.tolist()


def travelling(row: list[float], own: list[int], rule: str) -> dict[int, float]:
    smallest = min((abs(row[index]) for index in own), default=0.0)
    return {index: row[index] for index in own if rule == "repaired" or abs(row[index]) > smallest}


def owner(index: int, numel: int, world_size: int) -> int:
    """Whose region an index is in: regions are equal, the first ones longer by one where they cannot be."""
    sizes = [numel // world_size + (rank < numel % world_size) for rank in range(world_size)]
    return next(rank for rank in range(world_size) if index < sum(sizes[: rank + 1]))


@WORLDS
@RULES
@pytest.mark.parametrize(("numel", "share"), [(NUMEL, 0.05), (NUMEL, 0.3), (NUMEL, 0.9), (5, 0.5), (1, 0.9)])
def test_update_and_bytes(world_size: int, rule: str, numel: int, share: float) -> None:
    acc, chosen = accumulators(world_size, numel), some(world_size, numel, share)
    results, traffics = exchange(acc, chosen, rule)
    rows = acc.tolist()
    lists = [travelling(row, own, rule) for row, own in zip(rows, chosen, strict=True)]
    total: dict[int, float] = {}
    for entries in lists:
        for index, value in entries.items():
            total[index] = total.get(index, 0.0) + value
    as_regions = 3 * len(total) >= numel if rule == "published" else 8 * numel < 12 * len(total)
    held = [[index for index in total if owner(index, numel, world_size) == rank] for rank in range(world_size)]
    sizes = [sum(owner(i, numel, world_size) == rank for i in range(numel)) for rank in range(world_size)]
    for rank, (got, traffic) in enumerate(zip(results, traffics, strict=True)):
        assert dense(numel, *got.update) == [total.get(index, 0.0) / world_size for index in range(numel)]
        assert dense(numel, got.sent) == [rows[rank][i] if i in chosen[rank] else 0.0 for i in range(numel)]
        assert got.num_updated == (sum(map(bool, total.values())) if as_regions else len(total))
        assert got.counts == tuple(map(len, chosen))
        assert got.is_finite
        leaving = sum(owner(index, numel, world_size) != rank for index in lists[rank])
        assert traffic.num_bytes == {
            "counts": 16 * (world_size - 1),
            "indices": 4 * leaving + (0 if as_regions else gathered([4 * len(own) for own in held], rank)),
            "values": 8 * leaving + gathered([8 * size for size in (sizes if as_regions else map(len, held))], rank),
        }


def test_ranks_that_choose_from_slices_of_their_own() -> None:
    acc, chosen = accumulators(3), [[17, 19], [0, 3, 7], [8, 9]]
    results, _ = exchange(acc, chosen, overlap=Overlap.DISJOINT)
    picked = {index: acc[rank, index].item() / 3 for rank, own in enumerate(chosen) for index in own}
    for got in results:
        assert dense(NUMEL, *got.update) == [picked.get(index, 0.0) for index in range(NUMEL)]
        assert got.num_updated == 7


@pytest.mark.parametrize(("count", "is_dense"), [(16, False), (17, True)])
def test_regions_travel_dense_where_that_takes_fewer_bytes(count: int, is_dense: bool) -> None:
    """24 values of 8 bytes are as long as 16 pairs of 12."""
    acc = accumulators(2)
    _, traffics = exchange(acc, [list(range(count)), []])
    split = 4 * max(count - 12, 0)
    assert traffics[0].num_bytes["indices"] == (0 if is_dense else 4 * 12) + split
    assert traffics[1].num_bytes["indices"] == (0 if is_dense else 4 * (count - 12))


@pytest.mark.parametrize(("count", "is_dense"), [(7, False), (8, True)])
def test_published_goes_dense_at_a_third(count: int, is_dense: bool) -> None:
    acc = torch.arange(1.0, 25.0, dtype=torch.float64).repeat(2, 1)
    _, traffics = exchange(acc, [list(range(count + 1)), []], "published")  # the smallest does not travel
    assert traffics[0].num_bytes["indices"] == (0 if is_dense else 4 * count)
    assert traffics[0].num_bytes["values"] == 8 * (12 if is_dense else count)


def test_published_loses_the_smallest_of_every_choice_and_its_ties() -> None:
    acc = torch.zeros(2, NUMEL, dtype=torch.float64)
    acc[0, :4] = torch.tensor([4.0, -1.0, 3.0, 1.0])
    acc[1, 2] = 5.0
    results, _ = exchange(acc, [[0, 1, 2, 3], [2]], "published")
    for got in results:
        assert dense(NUMEL, *got.update)[:4] == [2.0, 0.0, 1.5, 0.0]
    assert dense(NUMEL, results[0].sent) == acc[0].tolist()
    assert dense(NUMEL, results[1].sent) == acc[1].tolist()
    repaired, _ = exchange(acc, [[0, 1, 2, 3], [2]])
    assert dense(NUMEL, *repaired[0].update)[:4] == [2.0, -0.5, 4.0, 0.5]
