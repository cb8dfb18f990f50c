"""Optimizers for sparse updates on real ranks: replicas keep the same weights and counts, whatever happens."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import micro
from tests.dist import fsdp_steps
from tests.dist.ddp_steps import MICRO, TINY_MB, TOPK, Net, batch, build, wrap
from tests.dist.on_ranks import of_all, on_ranks, the_same
from tests.small_models import local

pytestmark = pytest.mark.dist
OPTIMIZERS: dict[str, Any] = {"sparse_adamw": micro.SparseAdamW, "sign": micro.SignSGD}
REDUCERS = {
    "topk": TOPK,
    "micro": MICRO,
    "split": micro.Split(reducer=MICRO, min_dims=2),
    "two levels": micro.TwoLevel(reducer=TOPK, ranks_per_node=2),
}


def train(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Take steps; in step 3 rank 0 has a NaN, and every other step leaves the last layer out."""
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(step), used=(0, 1, 2, 3) if step % 2 else (0, 1, 2)).square().sum()
        (loss * float("nan") if step == 3 and dist.get_rank() == 0 else loss).backward()
        optimizer.step()


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", REDUCERS)
@on_ranks(2)
def test_replicas_keep_the_same_weights_and_counts_and_resume_with_the_same_bits(name: str, optimizer: str) -> None:
    def start() -> tuple[DistributedDataParallel, micro.Attachment, torch.optim.Optimizer]:
        reducer = dataclasses.replace(REDUCERS[name], nonfinite="skip")  # type: ignore[type-var]
        settings = {"bucket_cap_mb": TINY_MB, "find_unused_parameters": True}
        model, attachment = wrap(build(Net), reducer, **settings)
        return model, attachment, OPTIMIZERS[optimizer](model.parameters(), lr=0.01, max_steps=20)

    model, attachment, optim = start()
    train(model, optim, range(6))
    states = copy.deepcopy([part.state_dict() for part in (model, attachment, optim)])  # an optimizer loads no copies
    counts = [state["waited"] for state in optim.state.values() if "waited" in state]  # dense ones do not wait
    assert any((count > 0).any() for count in counts)
    for tensor in (*counts, *model.parameters()):
        the_same(tensor.detach())
    again = start()
    for part, state in zip(again, states, strict=True):
        part.load_state_dict(state)
    for each, chosen in ((model, optim), (again[0], again[2])):
        train(each, chosen, range(6, 9))
    assert all(map(torch.equal, model.parameters(), again[0].parameters()))


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_ranks(2)
def test_counts_go_on_with_another_number_of_ranks(optimizer: str) -> None:
    """Two ranks stop and each continues alone: arrived elements wait anew, others one step longer."""
    model, attachment = wrap(build(Net), MICRO, bucket_cap_mb=TINY_MB, find_unused_parameters=True)
    optim = OPTIMIZERS[optimizer](model.parameters(), lr=0.01, max_steps=20)
    train(model, optim, range(3))
    states = micro.average(of_all(attachment.state_dict()), 1)
    before = copy.deepcopy(optim.state_dict())
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model, attachment = wrap(build(Net), MICRO, process_group=alone, find_unused_parameters=True)
    attachment.load_state_dict(states[0])
    optim = OPTIMIZERS[optimizer](model.parameters(), lr=0.01, max_steps=20)
    optim.load_state_dict(copy.deepcopy(before))
    train(model, optim, range(5, 6))
    ends = optim.state_dict()["state"]
    waits = [(state["waited"], ends[key]["waited"]) for key, state in before["state"].items() if "waited" in state]
    assert any((after == 0).any() and (after > 1).any() for _, after in waits)
    for old, new in waits:
        assert ((new == 0) | (new == old + 1)).all()


@pytest.mark.xdist_group("four ranks")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_ranks(4)
def test_replicas_of_shards_keep_the_same_weights(optimizer: str) -> None:
    net, _ = fsdp_steps.attached(fsdp_steps.MICRO)
    trained: list[nn.Parameter] = [p for p in net.parameters() if p.requires_grad]
    optim = OPTIMIZERS[optimizer](trained, lr=0.01, max_steps=20)
    for step in range(4):
        optim.zero_grad()
        fsdp_steps.backward(net, step, last=step % 2 == 0)
        optim.step()
    mine = [(local(p.detach()), local(optim.state[p]["waited"])) for p in trained if local(p).numel()]
    first, second = of_all(mine)[dist.get_rank() % 2 :: 2]
    assert any(count.any() for _, count in first)
    for one, other in zip(first, second, strict=True):
        assert all(map(torch.equal, one, other))
