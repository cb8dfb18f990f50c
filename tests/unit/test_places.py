"""Entries at given indices: compiled and by torch, to the bit."""

import pytest
import torch

from micro.kernels import places
from micro.randomness import generator
from tests.products import grid


@pytest.fixture(autouse=True)
def few_entries_are_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "FEWEST", 0)


@grid(dtype=[torch.float32, torch.float64], index_dtype=[torch.int32, torch.int64], count=[0, 1, 500])
def test_entries_are_read_added_to_and_taken(dtype: torch.dtype, index_dtype: torch.dtype, count: int) -> None:
    randomness = generator(count)
    x = torch.randn(1000, generator=randomness).to(dtype)
    indices = torch.randperm(1000, generator=randomness)[:count].to(index_dtype)
    values = torch.randn(count, generator=randomness).to(dtype)
    kept = x.clone()
    assert torch.equal(places.gather(x, indices), kept[indices])
    places.add_(x, indices, values)
    assert torch.equal(x, kept.index_add(0, indices, values))
    x.copy_(kept)
    assert torch.equal(places.take_(x, indices, values), kept[indices])
    assert torch.equal(x, kept.index_add(0, indices, values, alpha=-1))
    places.add_(x, indices, values, alpha=0.5)
    assert torch.equal(x, kept.index_add(0, indices, values, alpha=-1).index_add(0, indices, values, alpha=0.5))


def test_entries_added_twice_count_twice() -> None:
    x = torch.zeros(3)
    places.add_(x, torch.tensor([2, 0, 2], dtype=torch.int32), torch.tensor([1.0, 2.0, 4.0]))
    assert x.tolist() == [2, 0, 5]


@pytest.mark.parametrize("index", [-1, 3])
def test_no_index_lies_outside(index: int) -> None:
    indices = torch.tensor([0, index], dtype=torch.int32)
    for call in (
        lambda x: places.gather(x, indices),
        lambda x: places.add_(x, indices, torch.ones(2)),
        lambda x: places.take_(x, indices, torch.ones(2)),
    ):
        with pytest.raises((IndexError, RuntimeError)):
            call(torch.zeros(3))
