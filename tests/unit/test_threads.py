"""Compiled loops on several threads: what they give is the same bit for bit, whatever the number of threads."""

import math
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from micro import kernels
from micro.kernels import places, threads

NUMEL = 70_001


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "LEAST", 1 << 10)
    yield
    torch.set_num_threads(before)


def normal(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).to(dtype)


def absorbed(dtype: torch.dtype) -> list[object]:
    residual, grad = normal(), normal(1, dtype)
    grad[NUMEL - 9], grad[50_000], grad[40_000] = math.nan, math.inf, -math.inf
    return [kernels.absorb_(residual, grad), residual, grad]


def above_by_piece() -> list[object]:
    edges = torch.tensor([[3, 20_001], [20_001, 20_001], [30_000, 69_999]])
    return list(kernels.above_by_piece(normal(), edges, torch.tensor([0.5, 0.0, 2.0])))


def largest_of_each() -> list[object]:
    spans = torch.tensor([[3, 20_001], [20_001, 20_001], [30_000, 40_000], [40_000, 40_100], [50_000, NUMEL]])
    x = normal()
    x[40_000:40_090] = math.nan  # fewer numbers than are to be chosen
    return [kernels.largest_of_each(x, spans, torch.tensor([70, 0, 3, 20, 5000]), longest=20_001)]


def entries() -> list[object]:
    indices = torch.nonzero(normal().abs() > 0.5).view(-1).to(torch.int32)
    x, values = normal(1), normal(2)[: indices.numel()]
    found = places.take_(x, indices, values)
    places.add_(x, indices, 3 * values)
    return [found, places.gather(x, indices.flip(0)), x]


def entries_added_twice() -> list[object]:
    x = normal()
    places.add_(x, (torch.arange(NUMEL, dtype=torch.int32) * 7) % 1000, normal(1))
    return [x]


LOOPS: dict[str, Callable[[], list[object]]] = {
    "absorb": lambda: absorbed(torch.float32),
    "absorb bfloat16": lambda: absorbed(torch.bfloat16),
    "above": lambda: list(kernels.above_with_magnitudes(normal(), 1.0)),
    "above by piece": above_by_piece,
    "largest of each": largest_of_each,
    "entries": entries,
    "entries added twice": entries_added_twice,
    "above nothing": lambda: list(kernels.above_with_magnitudes(normal(), 100.0)),
    "counts": lambda: [kernels.magnitude_counts(normal(), first_bit_pattern=0, shift=20, num_bins=2040)],
}


@pytest.mark.parametrize("name", LOOPS)
def test_results_do_not_depend_on_the_number_of_threads(name: str) -> None:
    torch.set_num_threads(1)
    expected = LOOPS[name]()
    for number in (2, 3, 5):
        torch.set_num_threads(number)
        for one, other in zip(LOOPS[name](), expected, strict=True):
            if isinstance(one, Tensor) and isinstance(other, Tensor):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)
            else:
                assert one == other


def test_parts_follow_each_other_and_are_done_by_several_threads() -> None:
    torch.set_num_threads(2)
    both = threading.Barrier(2, timeout=200)  # passed by two parts at a time alone

    def work(start: int, stop: int) -> tuple[int, int]:
        both.wait()
        return start, stop

    spans = threads.in_parts(work, NUMEL, unit=64)
    assert len(spans) == 2 * threads.PARTS
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == NUMEL
    assert not any(start % 64 for start, _ in spans)


def test_a_part_that_fails_raises_in_the_caller() -> None:
    torch.set_num_threads(2)

    def work(start: int, stop: int) -> None:
        raise ValueError(f"{start}")

    with pytest.raises(ValueError, match=r"\d"):
        threads.in_parts(work, NUMEL)
    assert threads.in_parts(lambda start, stop: stop - start, NUMEL)  # helpers live on


def test_short_vectors_and_busy_ranks_stay_on_one_thread() -> None:
    torch.set_num_threads(2)

    def spans(numel: int) -> int:
        return len(threads.in_parts(lambda start, stop: None, numel))

    busy = True
    assert spans(2 * threads.LEAST - 1) == 1
    with threads.one_while(lambda: busy):
        assert spans(NUMEL) == 1
        busy = False
        assert spans(NUMEL) > 1
    busy = True
    assert spans(NUMEL) > 1
