"""Ranks that attach different things, or that do not all attach: all of them say so in one line, and none waits."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import micro
from tests.dist.processes import ranks

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
MICRO = micro.SparseReducer(micro.Micro(), density=0.1)


def words_of(work: Callable[[], object]) -> str:
    with pytest.raises((ValueError, RuntimeError), match=r".+") as caught:
        work()
    return str(caught.value)


def attach_in_another_order(outputs: int) -> list[str]:
    """Return what each rank says of the first model, and of the second."""
    torch.manual_seed(0)
    models = [DistributedDataParallel(nn.Linear(16, 4)), DistributedDataParallel(nn.Linear(16, outputs))]
    order = models if dist.get_rank() == 0 else models[::-1]
    return [words_of(lambda model=model: micro.attach(model, MICRO)) for model in order]  # type: ignore[misc]


@pytest.mark.parametrize(("outputs", "words"), [(4, "weights must be the same"), (3, "the model must be the same")])
def test_models_in_another_order_are_refused_on_all_ranks(outputs: int, words: str) -> None:
    first, second = ranks(2).run(attach_in_another_order, outputs)
    assert first == second
    assert all(said.startswith(f"{words} on all ranks") and "\n" not in said for said in first)


def refuse_before_the_ranks_meet(driver: str) -> list[str]:
    """Return what each rank says where rank 1 gives what is no model of this driver; then attach."""
    model = nn.Linear(4, 4)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong = dist.get_rank() == 1
    if driver == "micro.attach":
        wrapped = DistributedDataParallel(model)
        said = [words_of(lambda: micro.attach(model if wrong else wrapped, MICRO)) for _ in range(2)]
        micro.attach(wrapped, MICRO).close()
        return said
    replicas: Any = object() if wrong else None
    said = [words_of(lambda: micro.LocalSteps(model, optimizer, MICRO, every=2, replicas=replicas)) for _ in range(2)]
    micro.LocalSteps(model, optimizer, MICRO, every=2).close()
    return said


@pytest.mark.parametrize("driver", ["micro.attach", "micro.LocalSteps"])
def test_what_one_rank_refuses_before_the_ranks_meet_is_raised_on_all(driver: str) -> None:
    others, own = ranks(2).run(refuse_before_the_ranks_meet, driver)
    assert others == [f"rank 1 refused {driver}: {words}" for words in own]


def attach_on_one_rank_alone() -> tuple[str, float]:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    if dist.get_rank() == 1:
        return "", 0.0
    started = time.monotonic()
    return words_of(lambda: micro.attach(model, MICRO)), time.monotonic() - started


def test_a_rank_that_does_not_attach_is_named_by_those_that_do() -> None:
    (words, seconds), _ = ranks(2).run(attach_on_one_rank_alone)
    assert "rank 1 did not come to micro.attach within 2 s" in words
    assert seconds < 20


def skip_a_step_on_rank_1() -> tuple[torch.Tensor, int]:
    """Train with a scaler that leaves out one step of rank 1; return the weights and the steps taken."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    local = micro.LocalSteps(model, optimizer, MICRO, every=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(9):
        loss = model(torch.randn(8, 16)).square().mean()
        if dist.get_rank() == 1 and step == 2:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    local.finish()
    steps = local.num_steps
    local.close()
    return model.weight.detach(), steps


def test_local_steps_end_where_a_scaler_leaves_out_a_step_of_one_rank() -> None:
    (first, steps), (second, fewer) = ranks(2).run(skip_a_step_on_rank_1)
    assert (steps, fewer) == (9, 8)
    assert torch.equal(first, second)
