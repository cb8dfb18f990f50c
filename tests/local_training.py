"""A small network that simulated ranks train with local steps."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import micro
from micro.comm import Comm
from micro.lockstep import SimulatedRanks

LR, BATCH = 0.05, 6
Inner = Callable[[Any], torch.optim.Optimizer]
SGD: Inner = partial(torch.optim.SGD, lr=LR)
ADAM: Inner = partial(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.95))
SPARSE = micro.SparseReducer(micro.TopK(), 0.2, micro.Gather())


def network(*, has_norm: bool = False) -> nn.Module:
    torch.manual_seed(3)
    middle = nn.BatchNorm1d(6) if has_norm else nn.Identity()
    parts = {"a": nn.Linear(5, 6), "norm": middle, "tanh": nn.Tanh(), "b": nn.Linear(6, 2)}
    return nn.Sequential(OrderedDict(parts)).double()


def backward(model: nn.Module, step: int, rank: int) -> None:
    drawn = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(BATCH, 5, generator=drawn, dtype=torch.float64)
    targets = torch.randn(BATCH, 2, generator=drawn, dtype=torch.float64) + inputs[:, :2]
    model.zero_grad()
    (model(inputs) - targets).square().mean().backward()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def on_ranks(world_size: int, work: Callable[[Comm], Any]) -> list[Any]:
    torch.manual_seed(0)
    with closing(SimulatedRanks(world_size)) as group:
        return group.run(work)


def trained(
    world_size: int, num_steps: int, reducer: micro.Reducer, inner: Inner = SGD, **settings: Any
) -> list[list[Tensor]]:
    """Return for each rank its weights after each step."""
    models = [network() for _ in range(world_size)]

    def work(comm: Comm) -> list[Tensor]:
        model = models[comm.rank]
        optimizer, seen = inner(model.parameters()), []
        with micro.LocalSteps(model, optimizer, reducer, comm=comm, **settings):
            for step in range(num_steps):
                backward(model, step, comm.rank)
                optimizer.step()
                seen.append(flat(model))
        return seen

    return on_ranks(world_size, work)


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
