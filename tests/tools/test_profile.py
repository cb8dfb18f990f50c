"""What the profiler makes of measured times, and what it refuses before anything starts."""

from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

from experiments.config.errors import UserError
from experiments.tools.profile import backward, link
from tests.refusals import refused

LENGTHS = {"forward_s": 1.0, "backward_s": 2.0, "update_s": 0.5}


def seconds(ready: dict[str, float], used: dict[str, float] | None = None, **lengths: float) -> dict[str, Any]:
    return {"ready": ready, "used": used or {}, "lengths": LENGTHS | lengths}


def row(*steps: dict[str, Any], names: tuple[str, ...] = ("a", "b")) -> dict[str, Any]:
    facts = {"model": "toy", "batch_size": 4, "device": "cpu", "element_bytes": 4}
    return facts | {"num_bytes": dict.fromkeys(names, 8), "shapes": dict.fromkeys(names, (2,)), "steps": list(steps)}


class Counting(backward.Watched):
    """A second passes between any two stamps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, torch.device("cpu"))
        self._times = count()

    def now(self) -> int:
        return next(self._times)


def step_of(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Counting(model).step(lambda module: module(torch.ones(2, 3)).square().sum(), optimizer)


def test_a_step_stamps_first_use_and_readiness_in_the_order_of_the_work() -> None:
    found = step_of(nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)))
    # start, first used, second used, loss, second ready, first ready, backward done, updated
    assert found["used"] == {"0.weight": 1, "1.weight": 2}
    assert list(found["ready"].items()) == [("1.weight", 1), ("0.weight", 2)]
    assert found["lengths"] == {"forward_s": 3, "backward_s": 3, "update_s": 1}
    shared = nn.Linear(3, 3, bias=False)
    twice = step_of(nn.Sequential(shared, nn.ReLU(), shared))
    assert twice["used"] == twice["ready"] == {"0.weight": 1}


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        ([["ab", "ba"]], "'a' on rank 0 in step 0 and 'b' on rank 0 in step 1"),
        ([["ab"], ["a"]], "'b' on rank 0 in step 0 and 'nothing' on rank 1 in step 0"),
        ([["a"], ["ab"]], "'nothing' on rank 0 in step 0 and 'b' on rank 1 in step 0"),
        ([["a"]], "parameter 'b' gets no gradient"),
    ],
)
def test_orders_that_differ_or_are_not_whole_are_refused(orders: list[list[str]], words: str) -> None:
    rows = [row(*(seconds(dict.fromkeys(step, 1.0)) for step in steps)) for steps in orders]
    refused(lambda: backward.merge(rows), words, error=UserError)


def test_a_trace_holds_medians_over_steps_and_then_over_ranks() -> None:
    steps = [({"a": 1, "b": 2}, {"a": 4}), ({"a": 3, "b": 9}, {"a": 4}), ({"a": 2, "b": 3}, {"a": 5})]
    other = seconds({"a": 4, "b": 5}, {"a": 6}, forward_s=3.0, backward_s=7.0)
    trace = backward.merge([row(*(seconds(*step) for step in steps)), row(other, other, other)])
    assert [(layer.name, layer.ready_s, layer.used_s) for layer in trace.layers] == [("a", 3, 5), ("b", 4, None)]
    assert (trace.forward_s, trace.backward_s, trace.update_s) == (2, 4.5, 0.5)
    assert (trace.world_size, trace.num_steps, trace.batch_size) == (2, 3, 4)
    assert [(layer.num_bytes, layer.shape) for layer in trace.layers] == [(8, (2,)), (8, (2,))]
    crossed = backward.merge([row(seconds({"a": 3, "b": 2.5}))])  # time stamps of several streams can cross
    assert [layer.ready_s for layer in crossed.layers] == [3, 3] == [3, crossed.backward_s]


def test_no_rank_receives_more_than_the_largest_size() -> None:
    sizes = [64, 256, 1024, 4096, 16384]
    assert link.sizes_of("all_reduce", sizes, 8) == sizes
    assert link.sizes_of("gather_rows", sizes, 8) == [64, 256, 1024]
    assert link.sizes_of("gather_lists", sizes, 4096) == [64, 256]  # a curve needs two
