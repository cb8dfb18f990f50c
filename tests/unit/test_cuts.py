"""A selection among slices that is cut by counts: the compiled loops and plain torch give what brute force gives."""

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from micro.kernels import cuts, table
from micro.kernels.bit_patterns import bits_of_magnitude, magnitude_of
from micro.scales import ElementScales, Scales
from tests.products import grid

LOWEST, SHIFT, START = bits_of_magnitude(1.0), 20, 1000
FORMS = [cuts, *([table.module("collecting")] if table.has_numba() else [])]


def drawn(numel: int, seed: int = 0) -> Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 2
    return (values * 8).round() / 8  # many ties


def bin_of(value: float) -> int:
    return min((bits_of_magnitude(abs(value)) - LOWEST) >> SHIFT, cuts.NUM_BINS - 1)


@grid(form=FORMS, numel=[0, 1, 17, 500])
def test_candidates_are_counted_by_magnitude(form: ModuleType, numel: int) -> None:
    x = drawn(numel)
    indices, magnitudes, counts = form.collect(x, START, LOWEST, SHIFT)
    passing = [i for i, value in enumerate(x.tolist()) if abs(value) >= 1.0]
    bins = [bin_of(x[i].item()) for i in passing]
    assert indices.tolist() == [START + i for i in passing]
    assert magnitudes.tolist() == [abs(x[i].item()) for i in passing]
    assert counts.tolist() == [bins.count(place) for place in range(cuts.NUM_BINS)]
    assert (indices.dtype, counts.dtype) == (torch.int32, torch.int32)


@grid(lowest=[1, LOWEST, LOWEST + 1], steps=[-1, 0, 1])
def test_what_reaches_a_magnitude_in_double_precision_is_what_rounds_to_it(lowest: int, steps: int) -> None:
    middle = (magnitude_of(lowest - 1) + magnitude_of(lowest)) / 2
    value = math.nextafter(middle, steps * math.inf) if steps else middle
    x = torch.tensor([value], dtype=torch.float64)
    is_reached = bool(x.float() >= magnitude_of(lowest))
    assert cuts.collect(x, 0, lowest, SHIFT)[0].numel() == is_reached


@grid(dtype=[torch.float32, torch.float64], part=[(0, 9), (2, 3), (2, 8), (4, 4)])
def test_a_part_is_multiplied_as_the_whole_is(dtype: torch.dtype, part: tuple[int, int]) -> None:
    scales = Scales.of([3, 0, 4, 2], torch.tensor([0.1, 9.0, 1 / 3, 7.0], dtype=torch.float64))
    x = drawn(9).to(dtype)
    expected = torch.cat([x[:3] * 0.1, x[3:7] * (1 / 3), x[7:] * 7.0])
    assert torch.equal(scales.scaled(x), expected)
    assert torch.equal(scales.part(*part).scaled(x[slice(*part)]), expected[slice(*part)])


@grid(dtype=[torch.float32, torch.float64, torch.bfloat16], part=[(0, 9), (2, 8), (4, 4)])
def test_a_part_is_divided_as_the_whole_is(dtype: torch.dtype, part: tuple[int, int]) -> None:
    scales = ElementScales(drawn(9).abs().to(torch.promote_types(dtype, torch.float32)), 0.5, 1e-8)
    x = drawn(9).to(dtype)
    whole = scales.scaled(x)
    torch.testing.assert_close(whole.double(), x.double() / (0.5 * scales.roots.double() + 1e-8), rtol=1e-2, atol=0)
    assert whole.dtype == dtype
    assert torch.equal(scales.part(*part).scaled(x[slice(*part)]), whole[slice(*part)])


@grid(world_size=[1, 2, 7], k=[1, 10, 60, 10_000])
def test_ranks_share_the_bin_of_the_cut_in_proportion(world_size: int, k: int) -> None:
    counts = torch.randint(0, 9, (world_size, 32), generator=torch.Generator().manual_seed(k), dtype=torch.int32)
    cut = cuts.cut(counts, k)
    inside = counts[:, cut.bin].tolist()
    missing = sum(cut.taken) - int(counts[:, cut.bin + 1 :].sum())
    assert sum(cut.taken) == min(k, int(counts.sum())) == min(k, cut.num_candidates)
    assert 0 <= missing <= sum(inside)
    fair = [missing * count / max(sum(inside), 1) for count in inside]
    shares = [taken - int(row[cut.bin + 1 :].sum()) for taken, row in zip(cut.taken, counts, strict=True)]
    assert all(abs(share - part) < 1 for share, part in zip(shares, fair, strict=True))
    rests = [part - int(part) for part in fair]
    rounded_up = [share > part for share, part in zip(shares, fair, strict=True)]
    if any(rounded_up):  # those with the largest remainders, low ranks first among equals
        order = sorted(range(world_size), key=lambda r: (-round(rests[r], 9), r))
        assert sorted(order[: sum(rounded_up)]) == [r for r in range(world_size) if rounded_up[r]]
    assert cut.shares == tuple(shares)


@grid(form=FORMS, share=[0, 1, 2, 5])
def test_the_largest_are_kept_and_of_equals_the_first(form: ModuleType, share: int) -> None:
    x = drawn(400, seed=3)
    indices, magnitudes, _ = cuts.collect(x, START, LOWEST, SHIFT)
    bottom, top = LOWEST + (4 << SHIFT), LOWEST + (5 << SHIFT)
    found = list(zip(indices.tolist(), magnitudes.tolist(), strict=True))
    above = [i for i, value in found if bits_of_magnitude(value) >= top]
    inside = sorted((-value, i) for i, value in found if bottom <= bits_of_magnitude(value) < top)
    assert len(inside) > 5
    expected = sorted(above + [i for _, i in inside[:share]])
    assert form.keep(indices, magnitudes, len(expected), bottom, top, share).tolist() == expected


def row_of(sizes: dict[str, Any]) -> list[int]:
    """Return the places in the message of eight candidates, whose bins are 3, 0, 1, 2, 1, 3, 0 and 1."""
    values = torch.tensor([1.375, 1.0, 1.125, 1.25, 1.1875, 1.46875, 1.0, 1.1875])
    found = cuts.collect(values, START, LOWEST, 20)
    assert found[2][:4].tolist() == [2, 3, 1, 2]
    row = cuts.message(found, start=START, lowest=LOWEST, shift=20, **sizes)
    assert row[:32].tolist() == found[2].tolist()
    wire = row[32:].view(torch.uint8).tolist()
    width = sizes["width"]
    starts = range(0, width * sizes["capacity"], width)
    assert not any(wire[width * sizes["capacity"] :])
    return [sum(wire[at + byte] << 8 * byte for byte in range(width)) for at in starts]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_a_message_holds_what_is_kept_first(width: int) -> None:
    ahead = row_of({"sure": 3.0, "capacity": 7, "width": width})
    assert ahead == [0, 3, 5, 4, 7, 2, 1]  # sure ones ascend; of equals the lowest is first
    assert row_of({"sure": 0.0, "capacity": 9, "width": width}) == [5, 0, 3, 4, 7, 2, 1, 6, 0]


@pytest.mark.parametrize("width", [1, 3])
def test_ranks_keep_the_first_of_every_message_or_none_of_any(width: int) -> None:
    slices = drawn(300, seed=5).view(2, 150)
    starts, sure = [0, 150], torch.tensor([1.0, 2.0], dtype=torch.float64)
    sizes = {"capacity": 20, "width": width}
    found = [cuts.collect(part, start, LOWEST, SHIFT) for part, start in zip(slices, starts, strict=True)]
    rows = torch.stack(
        [
            cuts.message(one, start=start, lowest=LOWEST, shift=SHIFT, sure=float(few), **sizes)
            for one, start, few in zip(found, starts, sure, strict=True)
        ]
    )
    counts = rows[:, :32]
    kept = cuts.kept_by_all(rows, counts, sure, (3, 20), starts, **sizes)
    assert kept is not None
    largest = [sorted(zip((-one[1]).tolist(), one[0].tolist(), strict=True)) for one in found]
    assert sorted(kept[:3].tolist()) == sorted(i for _, i in largest[0][:3])
    assert sorted(kept[3:].tolist()) == sorted(i for _, i in largest[1][:20])
    assert kept.dtype == torch.int32
    assert cuts.kept_by_all(rows, counts, sure, (21, 2), starts, **sizes) is None  # more than a message holds
    fixed = counts.flip(1).cumsum(1)
    most = [int(row[row <= few].amax()) for row, few in zip(fixed, [100.0, 2.0], strict=True)]
    assert cuts.kept_by_all(rows, counts, torch.tensor([100.0, 2.0]), (most[0] - 1, 2), starts, **sizes) is None
    none = cuts.kept_by_all(rows, counts, torch.zeros(2), (0, 0), starts, **sizes)
    assert none is not None
    assert none.numel() == 0


def test_what_is_sure_follows_the_slices() -> None:
    sure = cuts.surely_kept([4, 16, 100], 0.25, 0.8, 3.0)
    assert sure.tolist() == [0.8 * x - 3.0 * x**0.5 for x in (4.0, 25.0, 1.0)]
