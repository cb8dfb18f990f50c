"""A lane with a thread and one without give the same updates."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
    ddp_gradients,
    one_loss,
    residuals,
    some_unused,
)
from tests.dist.processes import ranks

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]


def both_lanes(reducer: micro.Reducer, losses: Losses, settings: dict[str, Any]) -> tuple[list[bool], int]:
    """Return, per step, whether both gave the same bits; and the number of threads that reduce."""
    unused = losses is some_unused
    models = [
        DistributedDataParallel(build(Net), bucket_cap_mb=TINY_MB, find_unused_parameters=unused) for _ in range(2)
    ]
    if "process_group" in settings:
        group = dist.new_group(range(dist.get_world_size()))
        settings = {"process_group": group}
    before = {thread for thread in threading.enumerate() if thread.name == "micro-lane"}
    caller = micro.attach(models[0], reducer, lane="caller", **settings)
    new = {thread for thread in threading.enumerate() if thread.name == "micro-lane"} - before
    thread = micro.attach(models[1], reducer, lane="thread", **settings)
    same = []
    for step in range(4):
        first, second = (ddp_gradients(model, losses, step) for model in models)
        same.append(all(torch.equal(first[name], second[name]) for name in first))
        kept = [residuals(attachment.state_dict()) for attachment in (caller, thread)]
        same.append(all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0]))
    assert len(caller.bucket_names) > 1, "one bucket: a test of nothing"
    caller.close()
    thread.close()
    return same, len(new)


@pytest.mark.parametrize(
    ("reducer", "losses", "settings"),
    [
        *((reducer, losses, {}) for reducer in (TOPK, MICRO, DENSE) for losses in (one_loss, some_unused)),
        *((MICRO, one_loss, settings) for settings in ({"scope": "model"}, {"clip": 1.0}, {"process_group": True})),
    ],
)
def test_both_lanes_give_the_same_bits(reducer: micro.Reducer, losses: Losses, settings: dict[str, Any]) -> None:
    for same, num_threads in ranks(2).run(both_lanes, reducer, losses, settings):
        assert all(same)
        assert num_threads == 0
