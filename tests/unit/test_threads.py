"""Parts of a vector, shared out among the threads of a rank; tests/unit/test_forms.py compares what loops give."""

import threading
from collections.abc import Iterator

import pytest
import torch

from micro.kernels import threads

NUMEL = 70_001


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "LEAST", 1 << 10)
    yield
    torch.set_num_threads(before)


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
