"""TwoLevel on four real ranks, two nodes of two, behind the hook of DDP; test_gloo_laws.py has it without one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import micro
from tests.dist.ddp_steps import (
    MICRO,
    TINY_MB,
    Net,
    alike,
    build,
    ddp_gradients,
    flat,
    local_gradients,
    one_loss,
    some_unused,
    words_of,
    wrap,
)
from tests.dist.on_ranks import of_all, on_ranks, the_same

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("four ranks")]
TWO_LEVEL = micro.TwoLevel(reducer=MICRO, ranks_per_node=2)
BETWEEN = {"micro": MICRO, "dense": micro.DenseReducer(), "split": micro.Split(reducer=MICRO, min_dims=2)}


def num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize(
    ("name", "chosen"), [("micro", {}), ("dense", {}), ("split", {}), ("micro", {"dense": "*.bias"})]
)
@on_ranks(4)
def test_nothing_of_a_gradient_is_lost_behind_the_hook(name: str, chosen: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(build(Net), bucket_cap_mb=TINY_MB)
    attachment = micro.attach(ddp, micro.TwoLevel(reducer=BETWEEN[name], ranks_per_node=2), **chosen)
    sums = torch.zeros(2, dtype=torch.float64)
    for step in range(5):
        sums[0] += flat(local_gradients(ddp.module, one_loss, step)).sum() / 2  # two ranks make one node
        sums[1] += flat(ddp_gradients(ddp, one_loss, step)).sum() / 2  # two nodes, summed over four ranks
    sums[1] += sum(residual.sum() for residual in attachment.residuals())
    given, booked = torch.stack(of_all(sums)).sum(0)
    torch.testing.assert_close(booked, given, rtol=1e-9, atol=1e-9)
    assert {stats.step for stats in attachment.stats} == {4}


@pytest.mark.parametrize("settings", [{"bucket_cap_mb": TINY_MB}, {"find_unused_parameters": True}], ids=str)
@on_ranks(4)
def test_a_restored_run_equals_the_uninterrupted_one_bit_for_bit(settings: dict[str, Any]) -> None:
    (ddp, attachment), (again, second) = (wrap(build(Net), TWO_LEVEL, **settings) for _ in range(2))
    losses = some_unused if settings.get("find_unused_parameters") else one_loss
    for step in range(3):
        ddp_gradients(ddp, losses, step)
    second.load_state_dict(attachment.state_dict())
    assert alike(ddp, again, losses, range(3, 7))
    the_same(flat(ddp_gradients(ddp, losses, 7)))


@on_ranks(4)
def test_nodes_that_do_not_divide_the_ranks_are_refused_and_a_closed_attachment_leaves_no_group() -> None:
    ddp, three = DistributedDataParallel(build(Net)), micro.TwoLevel(reducer=MICRO, ranks_per_node=3)
    before = num_groups()
    words = words_of(ValueError, lambda: micro.attach(ddp, three))
    assert words == "ranks_per_node must divide the number of ranks, got 3 for 4 ranks"
    assert num_groups() == before
    with micro.attach(ddp, TWO_LEVEL):
        ddp_gradients(ddp, one_loss, 0)
        assert num_groups() == before + 3
    assert num_groups() == before
    assert alike(ddp, DistributedDataParallel(build(Net)), one_loss, range(1, 2), rounding=1e-12)


@on_ranks(4)
def test_a_nan_on_one_rank_stops_all() -> None:
    ddp, _ = wrap(build(Net), TWO_LEVEL, bucket_cap_mb=TINY_MB)
    ddp_gradients(ddp, one_loss, 0)
    factor = float("nan") if dist.get_rank() == 3 else 1.0
    words = words_of(micro.NonFiniteGradient, lambda: (next(one_loss(ddp, 1)) * factor).backward())
    assert "on rank 3 is not finite at step 1" in the_same(words)
    assert flat(ddp_gradients(ddp, one_loss, 2)).isfinite().all()
