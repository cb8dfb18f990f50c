"""Parts of a vector, shared out among the threads of a rank."""

import threading
from collections.abc import Iterator

import pytest
import torch

from micro.kernels import threads

NUMEL = 70_001


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "LEAST", 1 << 10)
    yield
    torch.set_num_threads(before)


def num_parts(numel: int) -> int:
    return len(threads.in_parts(lambda start, stop: None, numel))


def test_parts_follow_each_other_and_are_done_by_several_threads() -> None:
    both = threading.Barrier(2, timeout=200)  # passed by two parts at a time alone

    def work(start: int, stop: int) -> tuple[int, int]:
        both.wait()
        return start, stop

    spans = threads.in_parts(work, NUMEL, unit=64)
    assert len(spans) == 2 * threads.PARTS
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == NUMEL
    assert not any(start % 64 for start, _ in spans)


def test_a_part_that_fails_raises_in_the_caller_and_helpers_live_on() -> None:
    with pytest.raises(ZeroDivisionError):
        threads.in_parts(lambda start, stop: 1 // 0, NUMEL)
    assert num_parts(NUMEL) > 1


def test_short_vectors_and_busy_ranks_stay_on_one_thread() -> None:
    assert num_parts(2 * threads.LEAST - 1) == 1
    busy = True
    with threads.one_while(lambda: busy):
        assert num_parts(NUMEL) == 1
        busy = False
        assert num_parts(NUMEL) > 1
    busy = True
    assert num_parts(NUMEL) > 1
