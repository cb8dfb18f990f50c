"""What measures on a GPU in `experiments.bench gpu`, with stand-ins of events, warnings and graphs."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from experiments.benchmarks import gpu_ranks, gpu_timings
from tests.recorded_streams import recorded_streams


def test_seconds_are_the_median_between_events_after_a_warm_up() -> None:
    calls: list[int] = []
    with recorded_streams() as record:

        def work() -> None:
            calls.append(len(calls))
            for _ in range(100 if len(calls) <= gpu_timings.WARMUP else 2):
                next(record.names)  # a stand-in of an event takes its time from how many there were

        with patch.object(torch.cuda, "Event", Ticking(record.names)):
            assert gpu_timings._seconds(work) == pytest.approx(3e-3)
    assert len(calls) == gpu_timings.WARMUP + gpu_timings.ROUNDS


class Ticking:
    """Makes events whose time is that at which they are recorded: a millisecond for each name that was given out."""

    def __init__(self, names: Iterator[int]) -> None:
        self._names = names

    def __call__(self, *, enable_timing: bool) -> "Ticking":
        assert enable_timing
        return Ticking(self._names)

    def record(self) -> None:
        self.at = next(self._names)

    def synchronize(self) -> None:
        assert self.at

    def elapsed_time(self, later: "Ticking") -> float:
        return float(later.at - self.at)


def test_waits_are_the_warnings_about_synchronizing_operations() -> None:
    modes: list[str] = []

    def work() -> None:
        for _ in range(2):  # of one place: both count
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    with patch.object(torch.cuda, "set_sync_debug_mode", modes.append):
        assert gpu_timings._waits(work) == 2
        assert gpu_timings._waits(lambda: None) == 0
        with pytest.raises(ZeroDivisionError):
            gpu_timings._waits(lambda: 1 / 0)
    assert modes == ["warn", "default"] * 3


class Graph:
    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


def test_a_capture_says_yes_or_why_not() -> None:
    @contextmanager
    def graph(_: Graph) -> Iterator[None]:
        yield

    def refused() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with (
        patch.object(torch.cuda, "CUDAGraph", Graph),
        patch.object(torch.cuda, "graph", graph),
        patch.object(torch.cuda, "synchronize", lambda: None),
    ):
        assert gpu_timings._capture(lambda: None) == "yes"
        assert Graph.replays == 1
        assert gpu_timings._capture(refused) == "no: operation not permitted when stream is capturing"
    assert Graph.replays == 1


def test_steps_over_nccl_have_a_row_each_and_need_two_gpus() -> None:
    found = {
        "topk": {"ranks": 2, "problem": "", "step_s": 2e-3, "dense_s": 4e-3, "sent": 5e6},
        "oktopk": {"ranks": 2, "problem": "out of memory"},
    }
    lines = list(gpu_ranks.table(list(found), 10, lambda settings: found[settings["method"]]))
    assert lines[2:] == [
        "| `topk` | 2 | 2.000 | 4.000 | 0.50 | 5.000 |",
        "| `oktopk` | 2 | - | - | - | out of memory |",
    ]
    assert list(gpu_ranks.report(["topk"], 10, 1))[-1] == "Not measured: two GPUs are needed, 1 is visible."
