"""Loops of docs/your_loop.md: a dense reducer changes no bit of their weights, with a sparse one all ranks agree."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import micro
from tests.dist.ddp_steps import DENSE, MICRO, Net, batch, build, words_of
from tests.dist.on_ranks import on_ranks, the_same

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
STEPS = 4
Loop = Callable[[nn.Module], nn.Module | None]


def loss_of(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(batch(step)).square().sum()
    return loss


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def sam(model: nn.Module) -> None:
    """Sharpness-aware: the first backward looks for the direction, and its update is not a step."""
    optimizer, parameters = sgd(model.parameters()), list(model.parameters())
    for step in range(STEPS):
        with model.no_sync():  # type: ignore[operator]  # each rank climbs by its own gradient
            loss_of(model, step).backward()
        with torch.no_grad():
            starts = [p.clone() for p in parameters]
            for p in parameters:
                p.add_(0.05 * p.grad / p.grad.norm())
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with torch.no_grad():
            for p, start in zip(parameters, starts, strict=True):
                p.copy_(start)
        optimizer.step()
        optimizer.zero_grad()


def lbfgs(model: nn.Module) -> None:
    """A step calls its closure several times: each is a backward that reduces."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        optimizer.step(closure)


def two_optimizers(model: nn.Module) -> None:
    """Matrices by one optimizer, the rest by another, as with Muon."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = [
        sgd(p for p in trained if p.ndim > 1),
        torch.optim.AdamW([p for p in trained if p.ndim == 1], lr=0.01),
    ]
    for step in range(STEPS):
        loss_of(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def averaged_weights(model: nn.Module) -> nn.Module:
    """An exponential moving average of the weights, which is what is evaluated."""
    optimizer, average = sgd(model.parameters()), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return average


LOOPS = [sam, lbfgs, two_optimizers, averaged_weights]


def weights_after(loop: Loop, reducer: micro.Reducer | None) -> Tensor:
    """Return the weights (numel,) in the end; with None, of plain DDP."""
    model = DistributedDataParallel(build(Net))
    with micro.attach(model, reducer) if reducer else nullcontext():
        trained = loop(model) or model
    return torch.cat([p.detach().flatten() for p in trained.parameters()])


@pytest.mark.parametrize("loop", LOOPS)
@on_ranks(2)
def test_a_loop_trains_as_with_plain_ddp(loop: Loop) -> None:
    assert torch.equal(weights_after(loop, DENSE), weights_after(loop, None)), "a dense reducer changed the weights"
    assert the_same(weights_after(loop, MICRO)).isfinite().all()


@pytest.mark.parametrize("first", [0, 2])
@on_ranks(2)
def test_a_step_with_gradients_of_one_rank_is_refused_on_all(first: int) -> None:
    model = DistributedDataParallel(build(Net))
    with micro.attach(model, MICRO):
        optimizer = sgd(model.parameters())
        for step in range(first):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model.module, first).backward()
        words = the_same(words_of(ValueError, optimizer.step))
        assert "layers.0.weight" in words
        the_same(torch.cat([p.detach().flatten() for p in model.parameters()]))


@on_ranks(2)
def test_a_clipped_average_is_not_clipped_again() -> None:
    model = DistributedDataParallel(build(Net))
    with micro.attach(model, MICRO, clip=1e9):
        loss_of(model, 0).backward()
        assert "no_sync" in the_same(words_of(ValueError, lambda: loss_of(model, 1).backward()))


class Adapter(nn.Module):
    """A product of two thin matrices, added to a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.full((2, 8), 0.1, dtype=torch.float64))
        self.up = nn.Parameter(torch.full((8, 2), 0.1, dtype=torch.float64))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


@on_ranks(2)
def test_adapters_alone_are_reduced() -> None:
    net = build(Net).requires_grad_(False)
    for layer in net.layers:  # type: ignore[union-attr]
        nn.utils.parametrize.register_parametrization(layer, "weight", Adapter())
    model = DistributedDataParallel(net)
    with micro.attach(model, MICRO) as attachment:
        averaged_weights(model)
        assert sum(stats.numel for stats in attachment.stats) == 4 * 2 * (2 * 8)
    the_same(torch.cat([p.detach().flatten() for p in model.parameters()]))
