"""The largest of each piece against sorting each by itself."""

import torch
from torch import Tensor

from micro.selectors.piece_tables import largest_in_tables, tables_of
from micro.selectors.pieces import largest_of_each, pieces_at, pieces_of
from micro.values.flat import MAX_NUMEL
from tests.products import grid

LENGTHS = (2000, 1, 0, 300, 4096, 7, 5000)


def by_sorting(x: Tensor, lengths: tuple[int, ...], counts: list[int]) -> list[int]:
    chosen, start, sizes = [], 0, x.abs().tolist()
    for length, count in zip(lengths, counts, strict=True):
        chosen += sorted(sorted(range(start, start + length), key=lambda i: (-sizes[i], i))[:count])
        start += length
    return chosen


def vector(kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    scales = torch.cat([torch.full((length,), 10.0**-i) for i, length in enumerate(LENGTHS)])
    made = {"scaled": x * scales, "zero": 0 * x, "tied": x.sign(), "few": torch.where(x > 3, x, 0), "steps": x.round()}
    return made[kind].to(dtype)


@grid(
    kind=["scaled", "zero", "tied", "few", "steps"],
    dtype=[torch.float32, torch.float64],
    counts=[[50, 1, 0, 3, 41, 1, 200], [2000, 5, 2, 0, 4096, 7, 1], [0, 0, 0, 0, 0, 0, 0]],
)
def test_the_largest_of_each_piece(kind: str, dtype: torch.dtype, counts: list[int]) -> None:
    x = vector(kind, dtype)
    found = largest_of_each(x, pieces_of(LENGTHS), counts)
    assert found.dtype == torch.int32
    assert found.tolist() == by_sorting(x, LENGTHS, counts)


def test_pieces_may_leave_gaps_and_nan_is_never_among_the_largest() -> None:
    x = vector("scaled")
    parts = [(10, 20, 3), (2001, 6397, 2)]
    found = largest_of_each(x, pieces_at(tuple((start, stop) for start, stop, _ in parts)), [3, 2]).tolist()
    assert found == [start + i for start, stop, k in parts for i in by_sorting(x[start:stop], (stop - start,), [k])]
    assert largest_of_each(x, pieces_at(()), []).tolist() == []
    x[::3], x[100], x[2001] = float("nan"), float("-inf"), 0.0
    counts = [1900, 1, 0, 299, 40, 0, 200]  # the first and the fourth piece have fewer numbers
    assert not x[largest_of_each(x, pieces_of(LENGTHS), counts).long()].isnan().any()


def test_pieces_at_the_end_of_the_longest_vector() -> None:
    """A table has rows of equal length: that of the last, shorter piece would end beyond int32."""
    spans = ((0, 8), (MAX_NUMEL - 5, MAX_NUMEL))
    x, counts = torch.ones(1).expand(MAX_NUMEL), torch.tensor([2, 3])  # one number in memory
    found = largest_in_tables(x, tables_of(torch.tensor(spans), torch.device("cpu")), counts)
    assert found.tolist() == [0, 1, *range(MAX_NUMEL - 5, MAX_NUMEL - 2)]
