"""Gradients that are not finite, on a group of one rank in the process of the test."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import micro

NAN = float("nan")


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(seed: int = 0) -> DistributedDataParallel:
    torch.manual_seed(seed)
    return DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), bucket_cap_mb=1e-4)


def batch(step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("later", [(1.0, NAN), (NAN, 1.0)])
def test_a_nan_of_one_of_two_models_is_never_lost(later: tuple[float, float]) -> None:
    first, second = wrapped(1), wrapped(2)
    for model in (first, second):
        micro.attach(model, micro.SparseReducer(micro.Micro(), 0.2))

    def backward(step: int, factors: tuple[float, float]) -> None:
        losses = [model(batch(step)).square().mean() for model in (first, second)]
        (losses[0] * factors[0] + losses[1] * factors[1]).backward()

    backward(0, (1.0, 1.0))
    with pytest.raises(micro.NonFiniteGradient):
        backward(1, (NAN, NAN))  # autograd raises one error and drops what the other model had queued
    for step in (2, 4):
        with pytest.raises(micro.NonFiniteGradient, match=f"at step {step}"):
            backward(step, later)
        backward(step + 1, (1.0, 1.0))


def test_a_nan_that_was_raised_once_is_not_raised_again() -> None:
    first, second = wrapped(1), wrapped(2)
    for model in (first, second):
        micro.attach(model, micro.SparseReducer(micro.Micro(), 0.2))
    with pytest.raises(micro.NonFiniteGradient):
        ((first(batch(0)) + second(batch(0))) * NAN).mean().backward()
    (first(batch(1)) + second(batch(1))).mean().backward()
