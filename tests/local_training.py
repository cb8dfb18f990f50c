"""A small network that simulated ranks train with local steps."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import micro
from micro.comm.lockstep import SimulatedRanks
from micro.comm.ranks import Comm

LR, BATCH = 0.05, 6
Inner = Callable[[Any], torch.optim.Optimizer]
SGD: Inner = partial(torch.optim.SGD, lr=LR)
ADAM: Inner = partial(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.95))
NESTEROV = micro.Outer(lr=0.7, momentum=0.9, nesterov=True)
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


def simulated(world_size: int, work: Callable[[Comm], Any]) -> list[Any]:
    torch.manual_seed(0)
    return SimulatedRanks(world_size).run(work)


class Run:
    """A model that a rank trains with local steps; a context manager."""

    def __init__(
        self,
        comm: Comm,
        reducer: micro.Reducer = SPARSE,
        inner: Inner = SGD,
        *,
        model: nn.Module | None = None,
        has_norm: bool = False,
        **settings: Any,
    ) -> None:
        self.rank = comm.rank
        self.model = model or network(has_norm=has_norm)
        self.optimizer = inner(self.model.parameters())
        self.local = micro.LocalSteps(self.model, self.optimizer, reducer, **{"every": 2, "comm": comm} | settings)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.local.close()

    def train(self, *steps: int) -> Tensor:
        """Return the weights after these steps."""
        for step in steps:
            backward(self.model, step, self.rank)
            self.optimizer.step()
        return flat(self.model)


def trained(
    world_size: int, num_steps: int, reducer: micro.Reducer, inner: Inner = SGD, **settings: Any
) -> list[list[Tensor]]:
    """Return for each rank its weights after each step."""

    def work(comm: Comm) -> list[Tensor]:
        with Run(comm, reducer, inner, **settings) as run:
            return [run.train(step) for step in range(num_steps)]

    return simulated(world_size, work)


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
