"""The published form of gather: pairs cut into equal slices, whoever sent them."""

import pytest
import torch

import micro
from micro.sparse import Exchanged
from tests.exchanging import exchanged

NUMEL = 12


def exchange(acc: torch.Tensor, chosen: list[list[int]], rule: str | None = "published") -> list[Exchanged]:
    part = micro.build(micro.Exchange, {"name": "gather", "rule": rule})
    return exchanged(part, acc, chosen)[0]


def dense(got: Exchanged) -> list[float]:
    vector = torch.zeros(NUMEL, dtype=torch.float64)
    for part in got.update:
        part.add_to_(vector)
    return vector.tolist()


@pytest.mark.parametrize("world_size", range(1, 10))
@pytest.mark.parametrize("seed", range(5))
def test_slices_forget_who_sent_what(world_size: int, seed: int) -> None:
    randomness = torch.Generator().manual_seed(10 * seed + world_size)
    acc = torch.randint(1, 50, (world_size, NUMEL), generator=randomness).double()
    share = torch.rand(world_size, 1, generator=randomness)
    drawn = torch.rand(world_size, NUMEL, generator=randomness) < share
    chosen = [torch.nonzero(row).view(-1).tolist() for row in drawn]
    pairs = [(index, acc[rank, index].item() / world_size) for rank, own in enumerate(chosen) for index in own]
    size, expected, updated = len(pairs) // world_size, [0.0] * NUMEL, set()
    for part in range(world_size):
        last = dict(pairs[part * size : (part + 1) * size])
        for index, value in last.items():
            expected[index] += value
        updated |= set(last)
    for rank, got in enumerate(exchange(acc, chosen)):
        assert dense(got) == expected
        assert got.num_updated == len(updated)
        assert got.counts == tuple(map(len, chosen))
        assert got.sent.indices.tolist() == chosen[rank]  # all has left the residual
        assert torch.equal(got.sent.values, acc[rank, chosen[rank]])


def test_a_straddling_slice_counts_an_index_once_and_the_remainder_is_dropped() -> None:
    acc = torch.arange(1.0, 25.0, dtype=torch.float64).view(2, NUMEL)
    chosen = [[0, 1, 2], [1, 2, 3, 4, 5, 6]]  # nine pairs: 0 1 2 1 | 2 3 4 5 | 6
    got = exchange(acc, chosen)[1]
    assert dense(got)[:8] == [0.5, 14 / 2, (3 + 15) / 2, 16 / 2, 17 / 2, 18 / 2, 0.0, 0.0]
    kept = exchange(acc, chosen, None)[1]
    assert dense(kept)[:8] == [0.5, (2 + 14) / 2, (3 + 15) / 2, 16 / 2, 17 / 2, 18 / 2, 19 / 2, 0.0]
