"""Ranks with uneven inputs, in DDP's own join context: rank r has 3 + 2 r batches."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import micro
from tests.dist.ddp_steps import (
    DENSE,
    MICRO,
    TINY_MB,
    TOPK,
    Losses,
    Net,
    build,
    gradients,
    local_gradients,
    named,
    one_loss,
    over_ranks,
    some_unused,
    words_of,
)
from tests.dist.on_ranks import on_ranks, the_same
from tests.small_models import kept

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
UNUSED = {"find_unused_parameters": True}
NUM_STEPS = 5  # batches of the rank with the most


def train(
    ddp: DistributedDataParallel, losses: Losses, *, by_active: bool = False, lr: float = 0.01
) -> list[dict[str, Tensor]]:
    """Return the gradients that were applied in each of this rank's steps."""
    applied = []
    with Join([ddp], divide_by_initial_world_size=not by_active):
        for step in range(3 + 2 * dist.get_rank()):
            ddp.zero_grad()
            for loss in losses(ddp, step):
                loss.backward()
            applied.append(gradients(ddp.module))
            with torch.no_grad():
                for name, parameter in named(ddp.module).items():
                    parameter -= lr * applied[-1][name]
    return applied


@pytest.mark.parametrize("by_active", [False, True])
@pytest.mark.parametrize("settings", [{}, UNUSED], ids=["used", "unused"])
@on_ranks(2)
def test_uneven_inputs_train_as_in_plain_ddp(settings: dict[str, Any], by_active: bool) -> None:
    hooked, plain = (DistributedDataParallel(build(Net), bucket_cap_mb=TINY_MB, **settings) for _ in range(2))
    micro.attach(hooked, DENSE)
    losses = some_unused if settings else one_loss
    mine, theirs = (train(model, losses, by_active=by_active) for model in (hooked, plain))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15)
    micro.detach(hooked)
    mine, theirs = (train(model, losses, by_active=by_active) for model in (hooked, plain))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("reducer", "losses", "settings"), [(MICRO, one_loss, {}), (TOPK, some_unused, UNUSED)])
@on_ranks(2)
def test_a_joined_rank_gives_its_residual_and_nothing_is_lost(
    reducer: micro.Reducer, losses: Losses, settings: dict[str, Any]
) -> None:
    ddp, local = DistributedDataParallel(build(Net), bucket_cap_mb=TINY_MB, **settings), build(Net)
    attachment = micro.attach(ddp, reducer)
    applied = train(ddp, losses, lr=0.0)
    given = {name: torch.zeros_like(p) for name, p in named(local).items()}
    for step in range(len(applied)):
        for name, grad in local_gradients(local, losses, step).items():
            given[name] += grad
    assert {stats.step for stats in attachment.stats} == {NUM_STEPS - 1}, "a joined rank counts the steps too"
    share = 2 * dist.get_rank()  # the rank with the most batches has seen all updates
    waiting = kept(attachment)
    booked = {name: share * sum(step[name] for step in applied) + waiting[name].view_as(given[name]) for name in given}
    torch.testing.assert_close(over_ranks(booked), over_ranks(given), rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_a_nan_stops_a_joined_rank_too() -> None:
    ddp = DistributedDataParallel(build(Net), bucket_cap_mb=TINY_MB)
    micro.attach(ddp, MICRO)

    def losses(model: torch.nn.Module, step: int) -> Any:
        (loss,) = one_loss(model, step)
        yield loss * (float("nan") if step == NUM_STEPS - 1 else 1.0)

    assert "on rank 1 is not finite at step 4" in the_same(
        words_of(micro.NonFiniteGradient, lambda: train(ddp, losses))
    )
