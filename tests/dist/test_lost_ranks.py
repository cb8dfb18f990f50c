"""A rank whose process ends between two collectives of a step: the others end soon, with an error that says so."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import micro
from tests.dist import ddp_steps, fsdp_steps
from tests.dist.fresh_ranks import run_fresh
from tests.faults import Fault, Faulty

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("fresh ranks")]

TIMEOUT_S = 600.0  # timeout of collectives; other ranks must end long before


def train(driver: str, exits: int, reported: Path) -> None:
    """Take two steps; a rank exits in the second. Write how the other rank's step ended."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    fault = Fault("exits", rank=exits, at=0, op="AllGatherLists")
    step = (ddp_step if driver == "attach" else fsdp_step)(Faulty(reducer=ddp_steps.TOPK, fault=fault, step=1))
    step(0)
    dist.barrier()
    started = time.monotonic()
    try:
        step(1)
    except micro.PeerError as error:
        reported.write_text(f"{time.monotonic() - started}\n{error}")
        os._exit(0)


def ddp_step(reducer: micro.Reducer) -> Callable[[int], object]:
    model = DistributedDataParallel(ddp_steps.build(ddp_steps.Net))
    micro.attach(model, reducer)
    return lambda step: ddp_steps.ddp_gradients(model, ddp_steps.one_loss, step)


def fsdp_step(reducer: micro.Reducer) -> Callable[[int], object]:
    _, local, node = fsdp_steps.meshes()
    net = fsdp_steps.build(local)
    micro.attach_fsdp(net, reducer, replicas=node)
    return lambda step: fsdp_steps.train(net, range(step, step + 1))


@pytest.mark.parametrize(("driver", "exits"), [("attach", 0), ("attach", 1), ("attach_fsdp", 1)])
def test_the_others_of_a_rank_that_exits_end_soon(driver: str, exits: int, tmp_path: Path) -> None:
    with suppress(FileNotFoundError):  # no rank returns
        run_fresh(2, train, driver, exits, tmp_path / "reported")
    elapsed_s, message = (tmp_path / "reported").read_text().split("\n", 1)
    assert float(elapsed_s) < TIMEOUT_S / 10
    assert message.startswith(f"lost contact with rank {exits}: RuntimeError: ")
