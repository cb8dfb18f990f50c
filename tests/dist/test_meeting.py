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
from tests.dist.on_ranks import of_all, on_ranks, the_same
from tests.refusals import refused

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
MICRO = micro.SparseReducer(micro.Micro(), density=0.1)


def linear(outputs: int = 4) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(16, outputs)


def words_of(call: Callable[[], object]) -> str:
    return refused(call, "", error=(ValueError, RuntimeError))


@pytest.mark.parametrize(("outputs", "words"), [(4, "weights must be the same"), (3, "the model must be the same")])
@on_ranks(2)
def test_models_in_another_order_are_refused_on_all_ranks(outputs: int, words: str) -> None:
    torch.manual_seed(0)
    models = [DistributedDataParallel(nn.Linear(16, 4)), DistributedDataParallel(nn.Linear(16, outputs))]
    for model in models if dist.get_rank() == 0 else models[::-1]:
        said = the_same(words_of(lambda model=model: micro.attach(model, MICRO)))  # type: ignore[misc]
        assert said.startswith(f"{words} on all ranks")


@pytest.mark.parametrize("driver", ["micro.attach", "micro.LocalSteps"])
@on_ranks(2)
def test_what_one_rank_refuses_before_the_ranks_meet_is_raised_on_all(driver: str) -> None:
    """Rank 1 gives what is no model of this driver; then all attach."""
    model, is_wrong = linear(), dist.get_rank() == 1
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)

    def attach(*, wrong: bool = False) -> Any:
        if driver == "micro.attach":
            return micro.attach(model if wrong else wrapped, MICRO)
        return micro.LocalSteps(model, optimizer, MICRO, every=2, replicas=object() if wrong else None)  # type: ignore[arg-type]

    for _ in range(2):
        said, own = of_all(words_of(lambda: attach(wrong=is_wrong)))
        assert said == f"rank 1 refused {driver}: {own}"
    attach().close()


@on_ranks(2)
def test_a_rank_that_does_not_attach_is_named_by_those_that_do() -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    model = DistributedDataParallel(linear(), process_group=group)
    if dist.get_rank() == 0:
        started = time.monotonic()
        assert "rank 1 did not come to micro.attach within 2 s" in words_of(lambda: micro.attach(model, MICRO))
        assert time.monotonic() - started < 20


@on_ranks(3)
def test_where_the_last_of_three_does_not_attach_both_others_name_it() -> None:
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=2))
    model = DistributedDataParallel(linear(), process_group=group)
    if dist.get_rank() < 2:
        assert "rank 2 did not come to micro.attach" in words_of(lambda: micro.attach(model, MICRO))


@on_ranks(2)
def test_ranks_with_different_calls_are_named() -> None:
    model = linear()
    local = micro.LocalSteps(
        model, torch.optim.SGD(model.parameters(), lr=0.1), MICRO, every=2, replicas=dist.group.WORLD
    )
    calls = [local.restart, lambda: micro.AllRanks(local).state_dict()]
    said = the_same(words_of(calls[dist.get_rank()]))
    assert "LocalSteps.restart" in said
    assert "micro.AllRanks.state_dict" in said
    local.close()


@on_ranks(2)
def test_local_steps_end_where_a_scaler_leaves_out_a_step_of_one_rank() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with micro.LocalSteps(model, optimizer, MICRO, every=4) as local:
        for step in range(9):
            optimizer.zero_grad()
            factor = float("inf") if dist.get_rank() == 1 and step == 2 else 1.0
            scaler.scale(model(torch.randn(8, 16)).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        local.finish()
        assert local.num_steps == 9 - dist.get_rank()
    the_same(model.weight.detach())
