"""micro.attach_fsdp on a group of one rank: every kind of backward, its settings, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import micro
from tests.refusals import refused
from tests.sharded_models import REDUCER, attach, attached, one_rank_mesh, sharded
from tests.small_models import Named, TwoHeads, assert_same, backward, batch, given, gradients, kept, total

pytestmark = pytest.mark.usefixtures("one_rank")
TOPK = micro.SparseReducer(micro.TopK(), density=0.2)


def as_one(**settings: Any) -> nn.Module:
    """Return a model that is one FSDP module."""
    return fully_shard(TwoHeads(), mesh=one_rank_mesh(), **settings)


def plain(*steps: int, **settings: Any) -> Named:
    """Return the sum of the gradients of TwoHeads in some steps, without any reducer."""
    return given(TwoHeads(), *steps, **settings)


# --- backwards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "settings", "num_exchanges"),
    [(sharded, {}, 3), (as_one, {}, 1), (sharded, {"scope": "tensor"}, 3), (sharded, {"scope": "model"}, 1)],
)
def test_nothing_is_lost_and_what_a_step_does_not_use_gets_no_update(
    make: Callable[[], nn.Module], settings: dict[str, Any], num_exchanges: int
) -> None:
    model, applied = make(), []
    attachment = attach(model, TOPK, **settings)
    for step, both in enumerate([True, False, True]):
        model.zero_grad()
        waiting = kept(attachment).get("second.weight")
        backward(model, step, both=both)
        applied.append(gradients(model))
        if not both:
            assert model.second.weight.grad is None
            assert torch.equal(kept(attachment)["second.weight"], waiting)
    assert len(attachment.stats) == num_exchanges
    assert_same(total(*applied, kept(attachment)), total(plain(0, 2), plain(1, both=False)))


@pytest.mark.parametrize("how", ["set_requires_gradient_sync", "set_requires_all_reduce", "one backward"])
def test_micro_batches_are_one_step(how: str) -> None:
    model, attachment = attached()
    if how == "one backward":
        (model(batch(0)).square().sum() + model(batch(1)).square().sum()).backward()
    else:
        for step, waits in enumerate([True, False]):
            getattr(model, how)(not waits)
            backward(model, step)
    assert attachment.state_dict()["step"] == 1
    assert len(attachment.stats) == 3
    assert_same(total(gradients(model), kept(attachment)), plain(0, 1))


def test_a_paused_backward_touches_no_residual_and_no_optimizer_steps_before_the_next_exchange() -> None:
    model, attachment = attached()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    backward(model, 0)
    applied, before = gradients(model), kept(attachment)
    optimizer.zero_grad()
    with attachment.paused():
        backward(model, 1)
    assert_same(gradients(model), plain(1))
    assert_same(kept(attachment), before)
    refused(optimizer.step, "zero_grad() before the optimizer steps", "this node's own")
    backward(model, 2, both=False)
    optimizer.step()
    assert_same(total(applied, gradients(model), kept(attachment)), total(plain(0, 1), plain(2, both=False)))
    with attachment.paused():
        backward(model, 3)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def _fail(*_: object) -> None:
    raise ZeroDivisionError("of the backward")


def test_a_backward_that_breaks_off_leaves_gradients_with_which_no_optimizer_steps() -> None:
    model, attachment = attached()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = model.body.register_full_backward_pre_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        backward(model, 0)
    handle.remove()
    refused(optimizer.step, "an exception broke off")
    optimizer.zero_grad()
    model.reset_iter_state() if hasattr(model, "reset_iter_state") else pytest.skip("this torch cannot go on")
    backward(model, 1)
    assert_same(total(gradients(model), kept(attachment)), plain(1))


@pytest.mark.parametrize("types", [(torch.bfloat16, torch.float32), (None, torch.bfloat16)], ids=str)
def test_nothing_is_lost_in_mixed_precision(types: tuple[torch.dtype | None, torch.dtype]) -> None:
    policy = MixedPrecisionPolicy(*types)
    model, other = sharded(mp_policy=policy), sharded(mp_policy=policy)
    attachment = attach(model)
    applied, expected = ([given(each, step) for step in range(3)] for each in (model, other))
    assert_same(total(*applied, kept(attachment)), total(*expected))


def test_a_parameter_is_exchanged_while_it_is_trained() -> None:
    model = sharded()
    model.first.weight.requires_grad_(False)
    attachment = attach(model)
    backward(model, 0)
    before = kept(attachment)
    assert "first.weight" not in before
    model.first.weight.requires_grad_(True)
    model.second.weight.requires_grad_(False)
    applied, after, expected = given(model, 1), kept(attachment), plain(1)
    sums = total(applied, after)
    torch.testing.assert_close(sums["first.weight"], expected["first.weight"])
    assert torch.equal(after["second.weight"], before["second.weight"])


@pytest.mark.slow
def test_a_compiled_model_has_the_updates_of_the_model_itself() -> None:
    (model, attachment), (other, _) = attached(), attached()
    compiled = torch.compile(model, backend="eager")
    for step in range(2):
        backward(compiled, step)
        backward(other, step)
        assert_same(gradients(model), gradients(other))
        model.zero_grad()
        other.zero_grad()
    second = attach(torch.compile(sharded(), backend="eager"))
    second.load_state_dict(attachment.state_dict())
    assert_same(kept(second), kept(attachment))


# --- settings ---------------------------------------------------------------------------------------------------------


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_state_of_another_world_shard_or_scope_is_refused_by_name() -> None:
    model, attachment = attached()
    backward(model, 0)
    saved = attachment.state_dict()
    for change, key in (
        ({"world_size": 4}, "shards of a node have no mean"),
        ({"shard": [1, 2]}, "this rank has shard 0 of 1"),
        ({"scope": "model shard"}, "saved with scope"),
    ):
        refused(lambda change=change: attachment.load_state_dict(saved | change), key, "state")  # type: ignore[misc]
    refused(lambda: micro.average([saved], 2), "shards have no mean", "attach_fsdp")


def test_an_optimizer_inside_of_backward_is_refused() -> None:
    model, attachment = attached()
    handle = model.first.weight.register_post_accumulate_grad_hook(_fail)
    refused(lambda: backward(model, 0), "post-accumulate-grad hook", "first.weight")
    attachment.close()
    refused(lambda: attach(model), "step the optimizer after backward")
    handle.remove()


def parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    return fully_shard(parallelize_module(TwoHeads(), mesh["tensor"], {"body": ColwiseParallel()}), mesh=mesh["data"])


def with_ignored() -> nn.Module:
    model = TwoHeads()
    return fully_shard(model, mesh=one_rank_mesh(), ignored_params={model.first.weight})


def partly() -> nn.Module:
    model = TwoHeads()
    fully_shard(model.body)
    return model


@pytest.mark.parametrize(
    ("make", "settings", "key", "value"),
    [
        (as_one, {"clip": 1.0, "clip_norm": "rank"}, "clip_norm", "rank"),
        (as_one, {"reducer": micro.TwoLevel(reducer=TOPK, ranks_per_node=1)}, "two_level", "the reducer in it"),
        (as_one, {"reducer": micro.DenseReducer(), "scope": "model"}, "scope=model", "dense"),
        (as_one, {"replicas": None}, "replicas", "mesh['node']"),
        (lambda: as_one(offload_policy=CPUOffloadPolicy(pin_memory=False)), {}, "offload_policy", "CPUOffloadPolicy"),
        (lambda: as_one().requires_grad_(False), {}, "model", "no trained parameter"),
        (parallel, {}, "mesh of 2 dimensions", "fully_shard"),
        (partly, {}, "'first.weight' is not sharded", "fully_shard on the whole model"),
        (with_ignored, {}, "'first.weight' is not sharded", "ignored_params"),
        (TwoHeads, {}, "fully_shard", "TwoHeads"),
        (lambda: DistributedDataParallel(TwoHeads()), {}, "fully_shard", "use micro.attach"),
        (lambda: FullyShardedDataParallel(TwoHeads(), device_id=torch.device("cpu")), {}, "fully_shard", "FSDP1"),
        (lambda: attached()[0], {}, "all-reduce hook", "close the attachment"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(
    make: Callable[[], nn.Module], settings: dict[str, Any], key: str, value: Any
) -> None:
    model = make()
    arguments = {"reducer": REDUCER, "replicas": one_rank_mesh()} | settings
    refused(lambda: micro.attach_fsdp(model, **arguments), key, value)


def test_a_module_that_was_replaced_is_refused_at_the_step() -> None:
    model, _ = attached()
    backward(model, 0)
    model.second = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, 1)
    refused(optimizer.step, "second.weight")


def test_averaged_gradients_that_would_be_clipped_again_are_refused() -> None:
    model, _ = attached(clip=1.0)
    for step in range(2):
        model.zero_grad(set_to_none=bool(step))
        backward(model, step)
    refused(lambda: backward(model, 2), "clip", "set_requires_gradient_sync")
