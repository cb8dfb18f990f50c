"""The lane: buckets are sent during backward, in one order, with equal results with and without a thread."""

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.reducers.base import BucketState
from micro.reducers.outcome import Outcome
from tests.dist.ddp_steps import (
    DENSE,
    MICRO,
    TINY_MB,
    TOPK,
    Losses,
    Net,
    alike,
    build,
    one_loss,
    some_unused,
)
from tests.dist.on_ranks import on_ranks
from tests.small_models import kept

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
BACKWARD_DONE = threading.Event()
OKTOPK = micro.SparseReducer(micro.TopK(), density=0.1, exchange=micro.Oktopk())


def small(**settings: Any) -> DistributedDataParallel:
    return DistributedDataParallel(build(Net), bucket_cap_mb=TINY_MB, **settings)


@dataclass(frozen=True, slots=True)
class Waiting(micro.DenseReducer):
    """Sends nothing before backward has come to an end: in a hook that blocks it would wait for ever."""

    name: ClassVar[str] = "waiting"
    is_one_sum: ClassVar[bool] = False  # so that it is reduced beside backward

    def reduction(self, state: BucketState, grad: Tensor, comm: Comm) -> Reduction[Outcome]:
        assert BACKWARD_DONE.wait(20), "backward waited for the first bucket"
        return micro.DenseReducer.reduction(self, state, grad, comm)


@on_ranks(2)
def test_backward_continues_while_a_bucket_waits_on_the_lane() -> None:
    """Gradients equal plain DDP's, although all are sent late."""
    ddp, bare = small(), small()
    attachment = micro.attach(ddp, Waiting())
    first_layer = next(ddp.module.layers[0].parameters())  # type: ignore[union-attr, operator]
    first_layer.register_post_accumulate_grad_hook(lambda _: BACKWARD_DONE.set())
    for step in range(3):
        BACKWARD_DONE.clear()
        assert alike(ddp, bare, one_loss, range(step, step + 1))
    assert len(attachment.stats) > 1, "one bucket: a test of nothing"
    assert attachment.exposed_s > 0


@pytest.mark.parametrize(("world_size", "reducer"), [(2, TOPK), (3, MICRO), (2, OKTOPK)])
@on_ranks()
def test_a_choice_within_the_whole_model_does_not_depend_on_what_travels_together(
    world_size: int, reducer: micro.Reducer
) -> None:
    """Bit for bit at two ranks; gloo's ring adds up three in an order that depends on the place in the message."""
    parted, whole = small(), DistributedDataParallel(build(Net))
    attachment, beside = micro.attach(parted, reducer, scope="model"), micro.attach(whole, reducer)
    assert alike(parted, whole, one_loss, range(4), rounding=0.0 if world_size == 2 else 1e-14)
    assert len(attachment.bucket_names) > 1, "one bucket: a test of nothing"
    assert attachment.stats[0].global_count == beside.stats[0].global_count
    assert len(attachment.stats[0].calls) == len(beside.stats[0].calls), "one exchange, however many buckets"


def lanes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "micro-lane"}


@pytest.mark.parametrize(
    ("reducer", "losses", "settings"),
    [
        *((reducer, losses, {}) for reducer in (TOPK, MICRO, DENSE) for losses in (one_loss, some_unused)),
        *((MICRO, one_loss, settings) for settings in ({"scope": "model"}, {"clip": 1.0}, {"process_group": True})),
    ],
)
@on_ranks(2)
def test_a_lane_with_a_thread_and_one_without_give_the_same_bits(
    reducer: micro.Reducer, losses: Losses, settings: dict[str, Any]
) -> None:
    models = [small(find_unused_parameters=losses is some_unused) for _ in range(2)]
    if "process_group" in settings:
        settings = {"process_group": dist.new_group(range(dist.get_world_size()))}
    before = lanes()  # lanes of earlier tests' models, which may end
    with micro.attach(models[0], reducer, lane="caller", **settings) as caller:
        assert lanes() <= before
        with micro.attach(models[1], reducer, lane="thread", **settings) as thread:
            assert alike(*models, losses, range(4))
            assert len(caller.bucket_names) > 1, "one bucket: a test of nothing"
            one, other = kept(caller), kept(thread)
    assert all(torch.equal(one[name], other[name]) for name in one)
