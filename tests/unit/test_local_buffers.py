"""Buffers of a model under local steps that change their length, shape or dtype, come or go, on one rank or on all."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from micro.comm.ranks import Comm
from tests.local_training import SPARSE, Run, backward, network, simulated
from tests.refusals import refused


def grow(buffers: nn.Module) -> None:
    buffers.seen = torch.ones(3).double()


def reshape(buffers: nn.Module) -> None:
    buffers.seen = torch.ones(1, 2).double()


def cast(buffers: nn.Module) -> None:
    buffers.seen = buffers.seen.float()  # type: ignore[operator]


def remove(buffers: nn.Module) -> None:
    del buffers.seen


def add(buffers: nn.Module) -> None:
    buffers.register_buffer("more", torch.ones(2))


def with_buffer() -> nn.Module:
    model = network()
    model.norm.register_buffer("seen", torch.ones(2, 1).double())  # type: ignore[operator, union-attr]
    return model


@pytest.mark.parametrize("change", [grow, reshape, cast, remove, add])
def test_buffers_that_differ_between_ranks_are_refused_on_all_ranks(change: Callable[[nn.Module], None]) -> None:
    def work(comm: Comm, policy: str) -> None:
        with Run(comm, model=with_buffer(), buffers=policy) as run:
            run.train(0)
            if comm.rank == 1:
                change(run.model.norm)  # type: ignore[arg-type]
            if policy == "own":
                run.train(1, 2)
                return
            name = "norm.more" if change is add else "norm.seen"
            refused(lambda: run.train(1), f"'{name}'", 'buffers="own"', "rank 1", error=RuntimeError)

    for policy in ("mean", "first", "own"):
        simulated(2, partial(work, policy=policy))


@pytest.mark.parametrize("change", [grow, cast, remove, add])
def test_a_round_that_is_not_finite_restores_buffers_that_changed_within_it(
    change: Callable[[nn.Module], None],
) -> None:
    with Run(Comm(), replace(SPARSE, nonfinite="skip"), model=with_buffer()) as run:
        run.train(0, 1)
        change(run.model.norm)  # type: ignore[arg-type]
        backward(run.model, 2, 0)
        run.model.a.bias.grad.fill_(torch.nan)  # type: ignore[union-attr]
        run.optimizer.step()
        run.train(3, 4)
        restored = with_buffer().state_dict()["norm.seen"]
        assert change is remove or torch.equal(run.model.norm.seen, restored)  # type: ignore[arg-type, union-attr]
