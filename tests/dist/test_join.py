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
    residuals,
    some_unused,
    words_of,
)
from tests.dist.processes import ranks

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
SMALL: dict[str, Any] = {"bucket_cap_mb": TINY_MB}
NUM_STEPS = 5  # of the rank with the most batches


def num_batches() -> int:
    return 3 + 2 * dist.get_rank()


def train(ddp: DistributedDataParallel, losses: Losses, *, by_active: bool = False) -> list[dict[str, Tensor]]:
    """Return the gradients that were applied in each of this rank's steps."""
    applied = []
    with Join([ddp], divide_by_initial_world_size=not by_active):
        for step in range(num_batches()):
            ddp.zero_grad()
            for loss in losses(ddp, step):
                loss.backward()
            applied.append(gradients(ddp.module))
            with torch.no_grad():
                for name, parameter in named(ddp.module).items():
                    parameter -= 0.01 * applied[-1][name]
    return applied


def beside_plain(settings: dict[str, Any], by_active: bool) -> list[bool]:
    """Return, per step, whether the dense reducer gave what DDP gives without a hook."""
    hooked, plain = (DistributedDataParallel(build(Net), **SMALL, **settings) for _ in range(2))
    micro.attach(hooked, DENSE)
    losses = some_unused if settings else one_loss
    mine, theirs = (train(model, losses, by_active=by_active) for model in (hooked, plain))
    return [
        all(torch.allclose(ours[name], other[name], rtol=1e-12, atol=1e-15) for name in ours)
        for ours, other in zip(mine, theirs, strict=True)
    ]


def books(reducer: micro.Reducer, losses: Losses, settings: dict[str, Any]) -> tuple[dict[str, Tensor], ...]:
    """Return the sum of all gradients, and what was applied plus what is kept."""
    ddp = DistributedDataParallel(build(Net), **SMALL, **settings)
    attachment = micro.attach(ddp, reducer)
    given = {name: torch.zeros_like(p) for name, p in named(ddp.module).items()}
    local = build(Net)
    applied = []
    with ddp.join():
        for step in range(num_batches()):
            for name, grad in local_gradients(local, losses, step).items():
                given[name] += grad
            ddp.zero_grad()
            for loss in losses(ddp, step):
                loss.backward()
            applied.append(gradients(ddp.module))
    assert {stats.step for stats in attachment.stats} == {NUM_STEPS - 1}, "a joined rank counts the steps too"
    is_longest = dist.get_rank() == dist.get_world_size() - 1
    seen = {
        name: is_longest * dist.get_world_size() * torch.stack([grads[name] for grads in applied]).sum(0)
        for name in given
    }
    kept = residuals(attachment.state_dict())
    return over_ranks(given), over_ranks({name: seen[name] + kept[name].view_as(seen[name]) for name in seen})


def nan_after_the_other_rank_has_joined() -> str:
    ddp = DistributedDataParallel(build(Net), **SMALL)
    micro.attach(ddp, MICRO)

    def losses(model: torch.nn.Module, step: int) -> Any:
        (loss,) = one_loss(model, step)
        yield loss * (float("nan") if step == NUM_STEPS - 1 else 1.0)

    return words_of(micro.NonFiniteGradient, lambda: train(ddp, losses))


UNUSED = {"find_unused_parameters": True}


@pytest.mark.parametrize("by_active", [False, True])
@pytest.mark.parametrize("settings", [{}, UNUSED], ids=["used", "unused"])
def test_uneven_inputs_train_as_in_plain_ddp(settings: dict[str, Any], by_active: bool) -> None:
    first, second = ranks(2).run(beside_plain, settings, by_active)
    assert first == [True] * 3
    assert second == [True] * 5


@pytest.mark.parametrize(("reducer", "losses", "settings"), [(MICRO, one_loss, {}), (TOPK, some_unused, UNUSED)])
def test_a_joined_rank_gives_its_residual_and_nothing_is_lost(
    reducer: micro.Reducer, losses: Losses, settings: dict[str, Any]
) -> None:
    for given, booked in ranks(2).run(books, reducer, losses, settings):
        torch.testing.assert_close(booked, given, rtol=1e-10, atol=1e-12)


def test_a_nan_stops_a_joined_rank_too() -> None:
    first, second = ranks(2).run(nan_after_the_other_rank_has_joined)
    assert first == second
    assert "on rank 1 is not finite at step 4" in first
