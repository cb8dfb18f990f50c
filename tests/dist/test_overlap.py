"""The lane: buckets travel while backward goes on, in one order, and what goes wrong there is told by backward."""

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.comm import Comm
from micro.reducers.base import BucketState
from micro.reducers.outcome import Outcome
from micro.requests import Reduction
from micro.scope import Scope
from tests.dist.ddp_steps import (
    MICRO,
    TINY_MB,
    TOPK,
    Net,
    build,
    ddp_gradients,
    keep_books,
    one_loss,
    some_unused,
)
from tests.dist.processes import ranks

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
SMALL = {"bucket_cap_mb": TINY_MB}


@dataclass(frozen=True, slots=True)
class Waiting(micro.DenseReducer):
    """Sends nothing before backward has come to an end: in a hook that blocks it would wait for ever."""

    name: ClassVar[str] = "waiting"
    is_one_sum: ClassVar[bool] = False  # so that it is reduced beside backward

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        assert BACKWARD_DONE.wait(20), "backward waited for the first bucket"
        return micro.DenseReducer.reduction(self, state, grad, comm)


BACKWARD_DONE = threading.Event()


def goes_on() -> tuple[bool, float]:
    """Return whether gradients equal those of plain DDP though all were sent late; and what backward did not hide."""
    ddp = DistributedDataParallel(build(Net), **SMALL)
    attachment = micro.attach(ddp, Waiting())
    first_layer = next(ddp.module.layers[0].parameters())  # type: ignore[union-attr, operator]
    first_layer.register_post_accumulate_grad_hook(lambda _: BACKWARD_DONE.set())
    bare = DistributedDataParallel(build(Net), **SMALL)
    same = []
    for step in range(3):
        BACKWARD_DONE.clear()
        mine, theirs = ddp_gradients(ddp, one_loss, step), ddp_gradients(bare, one_loss, step)
        same.append(all(torch.equal(mine[name], theirs[name]) for name in mine))
    assert len(attachment.stats) > 1, "one bucket: a test of nothing"
    return all(same), attachment.exposed_s


def whole_model_beside_one_bucket(reducer: micro.Reducer, **settings: Any) -> list[bool]:
    """Return, per step, whether a choice within the whole model is the same whatever travels together.

    Bit for bit at two ranks; gloo's ring adds up three in an order that depends on the place in the message.
    """
    small = DistributedDataParallel(build(Net), **SMALL, **settings)
    attachment = micro.attach(small, reducer, scope="model")
    whole = DistributedDataParallel(build(Net), **settings)
    beside = micro.attach(whole, reducer)
    same = []
    for step in range(4):
        mine, theirs = ddp_gradients(small, one_loss, step), ddp_gradients(whole, one_loss, step)
        rounding = 0.0 if dist.get_world_size() == 2 else 1e-14
        same.append(all(torch.allclose(mine[name], theirs[name], rtol=rounding, atol=rounding) for name in mine))
        same.append(all(torch.equal(mine[name] == 0, theirs[name] == 0) for name in mine))
        same.append(attachment.stats[0].global_count == beside.stats[0].global_count)
    assert len(attachment.bucket_names) > 1, "one bucket: a test of nothing"
    return same


def books_of_scope(scope: Scope, losses: Any, settings: dict[str, Any]) -> tuple[dict[str, Tensor], ...]:
    given, booked, _ = keep_books(Net, losses, MICRO, settings, scope=scope)
    return given, booked


def test_backward_goes_on_while_a_bucket_waits_on_the_lane() -> None:
    for same, exposed_s in ranks(2).run(goes_on):
        assert same
        assert exposed_s > 0


@pytest.mark.parametrize(("world_size", "reducer"), [(2, TOPK), (3, MICRO)])
def test_a_choice_within_the_whole_model_does_not_depend_on_what_travels_together(
    world_size: int, reducer: micro.Reducer
) -> None:
    for same in ranks(world_size).run(whole_model_beside_one_bucket, reducer):
        assert all(same)


@pytest.mark.parametrize("losses", [one_loss, some_unused])
@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_nothing_is_lost_in_any_scope(scope: Scope, losses: Any) -> None:
    settings = {**SMALL, "find_unused_parameters": losses is some_unused}
    for given, booked in ranks(2).run(books_of_scope, scope, losses, settings):
        torch.testing.assert_close(booked, given, rtol=1e-10, atol=1e-12)
