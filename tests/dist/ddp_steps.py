"""Models, batches and steps that tests of ``attach`` run on the ranks."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.reducers.scope import Scope
from tests.small_models import kept

TINY_MB = 1e-4  # about one layer of Net per bucket

TOPK = micro.SparseReducer(micro.TopK(), density=0.1, exchange=micro.Gather())
MICRO = micro.SparseReducer(micro.Micro(), density=0.1)
DENSE = micro.DenseReducer()


class Net(nn.Module):
    """Four layers; a forward uses the chosen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(4))

    def forward(self, x: Tensor, used: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        for index in used:
            x = torch.tanh(self.layers[index](x))
        return x


class HalfNet(Net):
    """The same in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.half()

    def forward(self, x: Tensor, used: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        return super().forward(x.half(), used)


class TiedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].register_parameter("weight", self.layers[1].get_parameter("weight"))


class MixedNet(nn.Module):
    """A layer of each dtype, of different shapes, a lone scalar and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(8, 5)
        self.wide = nn.Linear(5, 7, dtype=torch.float64)
        self.narrow = nn.Linear(7, 3, dtype=torch.bfloat16)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.single, self.wide, self.narrow, self.frozen):
            x = layer(x.to(layer.weight.dtype))
        return x * self.scale


ON_GPUS = "MICRO_TESTS_ON_GPUS"  # an environment variable; tests/gpu sets it


def device() -> torch.device:
    """The CPU, or a GPU, which ranks over gloo may share."""
    if dist.get_backend() != "nccl" and ON_GPUS not in os.environ:
        return torch.device("cpu")
    return torch.device("cuda", dist.get_rank() % torch.cuda.device_count())


def build(net: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return net().to(device())


def wrap(
    net: nn.Module, reducer: micro.Reducer, *, scope: Scope = "bucket", timed: bool = False, **settings: Any
) -> tuple[DistributedDataParallel, micro.Attachment]:
    ddp = DistributedDataParallel(net, **settings)
    return ddp, micro.attach(ddp, reducer, scope=scope, timed=timed)


def batch(step: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + dist.get_rank())
    return torch.randn(4, 8, generator=generator, dtype=torch.float64).to(device())


def named(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}


def gradients(net: nn.Module) -> dict[str, Tensor]:
    """Return the gradients; zeros if there are none."""
    return {name: p.grad.clone() if p.grad is not None else torch.zeros_like(p) for name, p in named(net).items()}


def over_ranks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return sums over all ranks, on the CPU; micro's own group is not used for it."""
    total = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for tensor in total.values():
        dist.all_reduce(tensor)
    return {name: tensor.cpu() for name, tensor in total.items()}


# One step of training, as the losses whose backward() it calls one after the other

Losses = Callable[[nn.Module, int], Iterator[Tensor]]


def one_loss(model: nn.Module, step: int) -> Iterator[Tensor]:
    yield model(batch(step)).float().square().sum()


def accumulated(model: nn.Module, step: int) -> Iterator[Tensor]:
    for part in range(3):
        waits = isinstance(model, DistributedDataParallel) and part < 2
        with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
            yield model(batch(step, part)).square().sum()


def two_backwards(model: nn.Module, step: int) -> Iterator[Tensor]:
    for part in range(2):
        yield model(batch(step, part)).square().sum()


def two_forwards(model: nn.Module, step: int) -> Iterator[Tensor]:
    yield model(batch(step)).square().sum() + model(batch(step, 1)).square().sum()


def some_unused(model: nn.Module, step: int) -> Iterator[Tensor]:
    """Each rank uses layer 0 and another one; at two ranks, one or two layers are used by nobody."""
    yield model(batch(step), (0, 1 + (step + dist.get_rank() * (step // 3)) % 3)).square().sum()


def two_used(model: nn.Module, step: int) -> Iterator[Tensor]:
    yield model(batch(step), (0, 1)).square().sum()


def local_gradients(net: nn.Module, losses: Losses, step: int) -> dict[str, Tensor]:
    """Return this rank's own gradients of a step, taken without DDP."""
    total = {name: torch.zeros_like(p) for name, p in named(net).items()}
    for loss in losses(net, step):
        found = torch.autograd.grad(loss, list(named(net).values()), allow_unused=True)
        for name, grad in zip(total, found, strict=True):
            if grad is not None:
                total[name] += grad
    return total


def ddp_gradients(ddp: DistributedDataParallel, losses: Losses, step: int) -> dict[str, Tensor]:
    ddp.zero_grad()
    for loss in losses(ddp, step):
        loss.backward()
    return gradients(ddp.module)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def alike(
    one: DistributedDataParallel, other: DistributedDataParallel, losses: Losses, steps: range, rounding: float = 0.0
) -> bool:
    """Return whether two models have the same gradients in all of these steps."""
    pairs = [[ddp_gradients(model, losses, step) for model in (one, other)] for step in steps]
    return all(
        torch.allclose(mine[name], theirs[name], rtol=rounding, atol=rounding)
        for mine, theirs in pairs
        for name in mine
    )


def keep_books(
    net: type[nn.Module],
    losses: Losses,
    reducer: micro.Reducer,
    settings: dict[str, Any],
    scope: Scope = "bucket",
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[list[tuple[str, ...]]]]:
    """Return the sum of all gradients; what was sent plus what is kept; the buckets' names after each step."""
    ddp, attachment = wrap(build(net), reducer, scope=scope, **settings)
    given = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named(ddp.module).items()}
    sent = copy.deepcopy(given)
    buckets = []
    for step in range(6):
        for name, grad in local_gradients(ddp.module, losses, step).items():
            given[name] += grad
        for name, grad in ddp_gradients(ddp, losses, step).items():
            sent[name] += grad
        buckets.append([tuple(bucket["shapes"]) for bucket in attachment.state_dict()["buckets"]])
        steps = [stats.step for stats in attachment.stats]
        assert len(steps) == len(buckets[-1]), "a bucket has no statistics"
        assert len(set(steps)) == 1, "buckets count steps apart"
    # what DDP hands out is a mean and the same everywhere, so its sum over ranks is what they sent
    booked = over_ranks(sent)
    for name, piece in over_ranks(kept(attachment)).items():
        if piece.numel():
            booked[name] += piece.view_as(booked[name])
    return over_ranks(given), booked, buckets


def words_of(kind: type[Exception], work: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        work()
    assert type(caught.value) is kind
    return str(caught.value)
