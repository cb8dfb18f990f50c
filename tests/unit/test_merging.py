"""Entries of several lists that are added up: walked along by compiled loops, or searched in torch, with equal bits."""

import math
from unittest.mock import patch

import pytest
import torch

from micro import kernels
from micro.sparse import SparseValues, joined, summed
from tests.products import grid


def drawn(num_lists: int, numel: int, dtype: torch.dtype) -> list[SparseValues]:
    randomness, parts = torch.Generator().manual_seed(num_lists), []
    for _ in range(num_lists):
        indices = torch.nonzero(torch.rand(numel, generator=randomness) < 0.3).view(-1).to(torch.int32)
        parts.append(SparseValues(indices, torch.randn(indices.numel(), generator=randomness, dtype=dtype)))
    return parts


def in_torch(parts: list[SparseValues]) -> SparseValues:
    with patch.object(kernels, "added", lambda *_: None):
        return summed(parts)


def same(got: SparseValues, expected: SparseValues) -> None:
    assert got.indices.dtype == expected.indices.dtype
    assert torch.equal(got.indices, expected.indices)
    assert [math.copysign(1, value) for value in got.values.tolist()] == [
        math.copysign(1, value) for value in expected.values.tolist()
    ]
    assert torch.equal(got.values, expected.values)


@grid(num_lists=[2, 3, 9, 40], numel=[0, 1, 10, 500], dtype=[torch.float32, torch.float64])
def test_sums_are_the_same_bits(num_lists: int, numel: int, dtype: torch.dtype) -> None:
    parts = drawn(num_lists, numel, dtype)
    same(summed(parts), in_torch(parts))


def test_a_zero_is_never_negative_and_lists_may_be_empty() -> None:
    lists = [([0, 3], [-0.0, 1.0]), ([], []), ([3, 5], [-1.0, -0.0])]
    parts = [SparseValues(torch.tensor(i, dtype=torch.int32), torch.tensor(v)) for i, v in lists]
    same(summed(parts), in_torch(parts))
    assert summed(parts).values.tolist() == [0.0, 0.0, 0.0]


def test_lists_that_do_not_ascend_are_added_too() -> None:
    parts = [
        SparseValues(torch.tensor([4, 1], dtype=torch.int32), torch.tensor([1.0, 2.0])),
        *drawn(1, 9, torch.float32),
    ]
    same(summed(parts), in_torch(parts))


@pytest.mark.skipif(not kernels.compiled(torch.ones(1)), reason="numba is not installed")
def test_the_loops_serve_lists_in_order() -> None:
    together, counts = joined(drawn(3, 50, torch.float32))
    assert kernels.added(together.indices, together.values, counts) is not None


@pytest.mark.skipif(not kernels.compiled(torch.ones(1)), reason="numba is not installed")
@pytest.mark.parametrize("numel", [0, 1, 10, 500])
def test_common_entries_are_those_of_both_lists(numel: int) -> None:
    mine, other = drawn(2, numel, torch.float32)
    found = kernels.common(mine.indices, mine.values, other.indices)
    assert found is not None
    is_common = torch.isin(mine.indices, other.indices)
    assert torch.equal(found[0], mine.indices[is_common])
    assert torch.equal(found[1], mine.values[is_common])
