"""Slices cover the vector once, differ by one element at most, and rotate so that every rank sees every slice."""

import pytest

from micro.values.sparse import cyclic, cyclic_slice, equal_slices

CASES = [(0, 1), (1, 1), (10, 1), (10, 3), (12, 4), (3, 5), (0, 4), (257, 8), (1000, 64)]


@pytest.mark.parametrize(("numel", "world_size"), CASES)
def test_slices_are_exclusive_complete_and_rotate(numel: int, world_size: int) -> None:
    size, longer = divmod(numel, world_size)
    whole = equal_slices(numel, world_size)
    assert [stop - start for start, stop in whole] == [size + 1] * longer + [size] * (world_size - longer)
    assert [index for start, stop in whole for index in range(start, stop)] == list(range(numel))
    for step in (0, 1, world_size, 12_345):
        of_ranks = [cyclic_slice(numel, step, rank, world_size) for rank in range(world_size)]
        assert list(cyclic(whole, step)) == of_ranks
        assert sorted(of_ranks) == sorted(whole)


def test_rotation_goes_up_by_one_slice_per_step() -> None:
    assert [cyclic_slice(12, step, 1, 4) for step in range(5)] == [(3, 6), (6, 9), (9, 12), (0, 3), (3, 6)]
