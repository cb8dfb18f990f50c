"""The largest of each piece against sorting each by itself."""

import pytest
import torch
from torch import Tensor

from micro.selectors import piece_tables
from micro.selectors.piece_tables import tables_of
from micro.selectors.pieces import largest_of_each, pieces_at, pieces_of
from micro.selectors.topk import shares
from tests.fake_device import DEVICE, DeviceTensor, fake_device
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


@pytest.mark.parametrize("kind", ["scaled", "zero", "tied", "steps"])
@pytest.mark.parametrize("lengths", [(400, 0, 399, 7), (64,) * 20, (1, 2)])
def test_short_pieces_are_chosen_from_on_a_device_without_a_wait(
    kind: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece_tables, "MOST", 640)
    x = vector(kind)[: sum(lengths)]
    for total in (0, 1, sum(lengths) // 7, sum(lengths)):
        with fake_device() as waits:
            tables_of.cache_clear()
            pieces = pieces_of(lengths, str(DEVICE))
            counts = shares(pieces, total)
            waits.seen.clear()
            found = largest_of_each(DeviceTensor(x), pieces, counts)
            assert not waits.seen
            assert found.device == DEVICE
            assert found.tolist() == by_sorting(x, lengths, counts.tolist())
