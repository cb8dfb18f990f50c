"""The table of `experiments.bench gpu` about steps of methods, with stand-ins for what measures on a GPU."""

from collections.abc import Callable, Iterator
from itertools import count

import torch

from experiments.benchmarks import gpu_steps
from experiments.benchmarks.gpu_steps import Meters

NUMEL = 1000
Work = Callable[[], object]


def meters() -> Meters:
    """Return meters that carry the work out; each takes a second more than the one before."""
    seconds: Iterator[int] = count(2)

    def measured(work: Work) -> float:
        work()
        return float(next(seconds))

    return Meters(measured, lambda work: 0 if work() is None else 1, lambda work: "yes" if work() is None else "no")


def test_each_method_has_a_row_and_a_step_without_reads_is_captured() -> None:
    lines = list(gpu_steps.table(["dense", "micro_fixed", "topk"], NUMEL, torch.device("cpu"), meters()))
    assert lines[2:] == [
        "| `dense` | 2000.000 | 1.00 | 0 | not tried |",
        "| `micro_fixed` | 3000.000 | 1.50 | 0 | yes |",
        "| `topk` | 4000.000 | 2.00 | 0 | not tried |",
    ]


def test_a_method_that_fails_has_a_row_that_says_why() -> None:
    times = iter([1.0])

    def measured(work: Work) -> float:
        for number in times:
            return number
        raise RuntimeError("out of memory\nand more")

    rest = Meters(measured, lambda work: 0, lambda work: "")
    lines = list(gpu_steps.table(["topk"], NUMEL, torch.device("cpu"), rest))
    assert lines[2:] == ["| `dense` | 1000.000 | 1.00 | 0 | not tried |", "| `topk` | - | - | - | out of memory |"]
