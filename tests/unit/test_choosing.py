"""Lists of indices: the k largest of few, and what several lists hold together, equal brute force."""

import pytest
import torch

from micro import kernels
from micro.kernels import reference
from micro.randomness import generator
from tests.products import grid


@grid(numel=[2, 3, 65, 1000, 16_385], levels=[1, 3, 1000], scale=[1e-40, 1.0, 1e30])
def test_the_largest_of_few_equal_the_reference(numel: int, levels: int, scale: float) -> None:
    """Few levels tie; denormal and huge numbers fill all digits of a magnitude."""
    x = torch.randn(numel, generator=generator(numel, levels)).mul(levels).round().mul(scale / levels)
    for k in {1, numel // 3 + 1, numel // 2, numel - 1}:
        assert torch.equal(kernels.largest(x, k), reference.largest(x, k))


@grid(numel=[1, 2, 1000], dtype=[torch.float32, torch.float64])
def test_ranked_magnitudes(numel: int, dtype: torch.dtype) -> None:
    x = torch.randn(numel, generator=generator(numel)).mul(8).round().to(dtype)
    ranks = [1, numel // 2 + 1, numel]
    falling = x.abs().sort(descending=True).values
    assert kernels.ranked(x, ranks).tolist() == [falling[rank - 1].item() for rank in ranks]


@grid(numel=[0, 1, 2, 65, 16_385], levels=[1, 3, 1000], scale=[1e-40, 1.0, 1e30], dtype=[torch.float32, torch.float64])
def test_the_largest_come_first_and_of_equals_the_first(
    numel: int, levels: int, scale: float, dtype: torch.dtype
) -> None:
    x = torch.randn(numel, generator=generator(numel, levels)).mul(levels).round().mul(scale / levels).to(dtype)
    x[2 * numel // 3 :] = 0.0  # as in a buffer that is not full
    order = sorted(range(numel), key=lambda place: -abs(x[place].item()))
    for count in {0, numel // 2, numel, numel + 3}:
        found = kernels.largest_first(x, count)
        assert found.dtype == torch.int64
        assert found.tolist() == order[:count]


def test_the_largest_of_few_may_be_infinite() -> None:
    x = torch.tensor([1.0, -torch.inf, 2.0, torch.inf])
    assert [kernels.largest(x, k).tolist() for k in (1, 2, 3)] == [[1], [1, 3], [1, 2, 3]]


@grid(numel=[1, 63, 64, 65, 100_000], count=[0, 1, 64, 5000], dtype=[torch.int32, torch.int64])
def test_distinct_indices_ascend(numel: int, count: int, dtype: torch.dtype) -> None:
    indices = torch.randint(numel, (count,), generator=generator(numel, count)).to(dtype)
    found = kernels.distinct(indices, numel)
    assert found.dtype == dtype
    assert found.tolist() == sorted(set(indices.tolist()))


@pytest.mark.parametrize("places", [slice(None, None, 2), slice(0, 100)])
def test_distinct_serves_strided_lists_and_many_indices(places: slice) -> None:
    indices = torch.arange(1000, dtype=torch.int32).repeat(2)[places]
    assert torch.equal(kernels.distinct(indices, 1000), torch.unique(indices))


@grid(numel=[1, 64, 65, 100_000], count=[0, 1, 64, 5000], dtype=[torch.int32, torch.int64])
def test_the_first_that_differ_by_a_map_and_by_sorting(numel: int, count: int, dtype: torch.dtype) -> None:
    indices = torch.randint(numel, (count,), generator=generator(numel, count)).to(dtype)
    in_turn = list(dict.fromkeys(indices.tolist()))
    for k in {0, 1, len(in_turn) // 2, len(in_turn), count + 1}:
        for found in (kernels.first_distinct(indices, numel, k), reference.first_distinct(indices, k)):
            assert found.dtype == dtype
            assert found.tolist() == sorted(in_turn[:k])
