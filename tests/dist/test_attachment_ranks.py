"""The life of an attachment among real ranks: it leaves nothing behind, and one rank's failure ends all."""

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.comm import process_groups
from micro.comm.group import PrivateComm
from tests.dist.ddp_steps import DENSE, MICRO, TINY_MB, Net, build, ddp_gradients, one_loss, words_of
from tests.dist.on_ranks import of_all, on_ranks, the_same
from tests.dist.processes import COLLECTIVE_S
from tests.faults import Fault, Faulty, InjectedError

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]


def wrapped(net: type[Net] = Net, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    return DistributedDataParallel(build(net), bucket_cap_mb=TINY_MB, process_group=group)


# --- a failure on one rank --------------------------------------------------------------------------------------------


class Raising(torch.autograd.Function):
    """An operation whose backward fails."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise LookupError("backward fails")


class NetThatFails(Net):
    """Its backward fails in the middle on rank 1."""

    def forward(self, x: Tensor, used: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        hidden = super().forward(x, used[:2])
        return super().forward(Raising.apply(hidden) if dist.get_rank() == 1 else hidden, used[2:])


def fail_in(where: str, settings: dict[str, Any], models: dist.ProcessGroup | None) -> str:
    """Return how a backward of this rank ends; `forget_models` is to follow on all ranks.

    What is kept of a step that was broken off is neither gone on from nor saved; the model may be used again.
    """
    model = wrapped(NetThatFails if where == "backward" else Net, models)
    if where == "backward":
        return how_it_ends(model, 0, micro.attach(model, MICRO, **settings))
    fault = Fault("fails", rank=1, at=0, op="AllGatherLists")
    with micro.attach(model, Faulty(reducer=MICRO, fault=fault, step=1), **settings) as attachment:
        ddp_gradients(model, one_loss, 0)
        failed = how_it_ends(model, 1)
        assert "broke off (" in words_of(RuntimeError, attachment.state_dict)
    if models is None:
        with micro.attach(model, DENSE):
            assert all(bool(grad.any()) for grad in ddp_gradients(model, one_loss, 2).values())
    return failed


def forget_models() -> None:
    """Free what was broken off, on all ranks now: it waits for its collectives until the other rank's is gone too."""
    gc.collect()


def how_it_ends(model: DistributedDataParallel, step: int, closes: Any = None) -> str:
    """Return the error, which leaves the context of the attachment where it is given."""
    started = time.perf_counter()
    with pytest.raises((InjectedError, LookupError, RuntimeError)) as caught, closes or nullcontext():
        ddp_gradients(model, one_loss, step)
    assert time.perf_counter() - started < COLLECTIVE_S / 3
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("kind", ["made", "own", "model"])
@pytest.mark.parametrize(
    ("where", "words"), [("reducer", "InjectedError: in AllGatherLists"), ("backward", "LookupError: backward fails")]
)
@on_ranks(2)
def test_a_failure_on_one_rank_ends_all_soon(where: str, words: str, kind: str) -> None:
    """Over a group that is made for the attachment, one of the user's, or the model's."""
    group = None if kind == "made" else dist.new_group(range(2))
    own: dict[str, Any] = {"own": {"process_group": group}, "model": {"lane": "caller"}, "made": {}}[kind]
    ended = fail_in(where, own, group if kind == "model" else None)
    forget_models()
    if group is not None:
        dist.destroy_process_group(group)
    assert ended == (words if dist.get_rank() == 1 else f"PeerError: rank 1 failed: {words}")


# --- ranks that differ ------------------------------------------------------------------------------------------------

DIFFERENT: list[tuple[dict[str, Any], str]] = [  # what rank 1 has where rank 0 has the defaults, and what is named
    ({"reducer": micro.SparseReducer(micro.Micro(), density=0.2)}, "density"),
    ({"start_step": 3}, "split"),
    ({"reducer": micro.SparseReducer(micro.TopK(), 0.1), "scope": "tensor", "clip": 1.0}, "per_tensor"),
    ({"clip": 1.0}, "clip"),
    ({"lane": "caller"}, "lane"),
    ({"scaler": torch.amp.GradScaler("cpu")}, "scaler"),
]


@on_ranks(2)
def test_settings_that_differ_between_ranks_or_that_one_refuses_are_refused_on_all() -> None:
    model, differs = wrapped(), dist.get_rank() == 1

    def words_with(other: dict[str, Any]) -> str:
        given = {"reducer": MICRO} | (other if differs else {})
        return words_of(ValueError, lambda: micro.attach(model, **given))

    for other, key in DIFFERENT:
        words = the_same(words_with(other))
        assert "rank 0 has " in words
        assert ", rank 1 " in words
        assert key in words
    before = torch.get_num_threads()
    torch.set_num_threads(before + differs)
    assert "number of torch's threads" in the_same(words_of(ValueError, lambda: micro.attach(model, micro.PowerSGD())))
    torch.set_num_threads(before)
    refused, own = of_all(words_with({"clip": -1.0}))
    assert "clip" in own
    assert refused == f"rank 1 refused micro.attach: {own}"
    micro.attach(model, MICRO)


@on_ranks(2)
def test_no_rank_has_the_new_group_before_all_have_joined_it() -> None:
    make: Callable[..., dist.ProcessGroup] = process_groups.new_group_like

    def make_late(*args: Any) -> dist.ProcessGroup:
        made = make(*args)
        time.sleep(0.3 * dist.get_rank())
        return made

    dist.barrier()
    started = time.perf_counter()
    with patch.object(process_groups, "new_group_like", make_late):
        PrivateComm(None, torch.device("cpu")).close()
    assert time.perf_counter() - started > 0.25


@on_ranks(2)
def test_a_hundred_skipped_steps_in_a_row_end_all_ranks_in_one_line() -> None:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    inputs = torch.full((1, 4), torch.inf if dist.get_rank() == 1 else 1.0)
    with micro.attach(model, replace(MICRO, nonfinite="skip")):
        for _ in range(99):
            model(inputs).sum().backward()
        words = words_of(micro.NonFiniteGradient, lambda: model(inputs).sum().backward())
    assert "scaler=" in the_same(words)


@on_ranks(2)
def test_scales_that_differ_are_refused_and_what_a_joined_rank_keeps_follows_the_others() -> None:
    rank, model = dist.get_rank(), wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0 + 4.0 * rank)
    with micro.attach(model, MICRO, scaler=scaler):
        words = words_of(ValueError, lambda: scaler.scale(next(one_loss(model, 0))).backward())
    assert "got 4 on rank 0 and 8 on rank 1" in words
    model, scaler = wrapped(), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = micro.attach(model, MICRO, scaler=scaler)
    with model.join():
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            scaler.scale(next(one_loss(model, step))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert float(attachment.state_dict()["loss_scale"]) == 32.0, "what is kept has the scale of the last backward"
    assert scaler.get_scale() == (64.0 if rank else 16.0), "a rank's own scaler grows with each of its steps"
