"""The arguments of micro.attach_fsdp, and what its attachment reports and saves, on a group of one rank."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import micro
from tests.sharded_models import REDUCER, assert_same, attached, backward, given, gradients, kept, one_rank_mesh, total
from tests.small_models import TwoHeads

pytestmark = pytest.mark.usefixtures("one_rank")

TOPK = micro.SparseReducer(micro.TopK(), density=0.2)


def refusal(model: nn.Module | None = None, reducer: object = REDUCER, **settings: Any) -> str:
    """Return the words with which attach_fsdp refuses."""
    model = model or sharded_whole()
    with pytest.raises(ValueError, match=r".") as caught:
        micro.attach_fsdp(model, reducer, **{"replicas": one_rank_mesh()} | settings)  # type: ignore[arg-type]
    words = str(caught.value)
    assert "\n" not in words
    return words


def sharded_whole(**settings: Any) -> nn.Module:
    return fully_shard(TwoHeads(), mesh=one_rank_mesh(), **settings)


def norm(model: nn.Module) -> float:
    return float(torch.cat([gradient.flatten() for gradient in gradients(model).values()]).norm())


@pytest.mark.parametrize("clip_norm", ["node", "global"])
def test_clip_bounds_the_norm_of_the_whole_gradient(clip_norm: str) -> None:
    model, attachment = attached(micro.DenseReducer(), clip=0.5, clip_norm=clip_norm)
    backward(model, 0)
    assert norm(model) == pytest.approx(0.5, rel=1e-5)
    expected = given(0)
    scale = 0.5 / float(torch.cat([gradient.flatten() for gradient in expected.values()]).norm())
    assert_same(gradients(model), {name: scale * gradient for name, gradient in expected.items()})
    attachment.clip = None
    model.zero_grad()
    backward(model, 0)
    assert_same(gradients(model), given(0))
    with pytest.raises(ValueError, match="clip must be positive"):
        attachment.clip = -1.0


def test_chosen_parameters_are_reduced_densely() -> None:
    for choice in (
        {"dense": ["*.bias", "body*"]},
        {"only": lambda name, p: p.ndim > 1 and not name.startswith("body")},
    ):
        model, attachment = attached(**choice)  # type: ignore[arg-type]
        backward(model, 0)
        expected = given(0)
        for name, gradient in gradients(model).items():
            is_dense = name.endswith("bias") or name.startswith("body")
            assert torch.allclose(gradient, expected[name]) == is_dense, name
        assert set(kept(attachment)) == {"first.weight", "second.weight"}
        assert attachment.summary.dense_share > 0.5


def test_the_first_steps_can_be_dense() -> None:
    model, attachment = attached(start_step=1)
    backward(model, 0)
    assert_same(gradients(model), given(0))
    model.zero_grad()
    backward(model, 1)
    assert attachment.summary.density < 0.5


def test_the_whole_model_can_be_one_vector() -> None:
    model, attachment = attached(TOPK, scope="model")
    applied = []
    for step, both in enumerate([True, False, True]):
        model.zero_grad()
        backward(model, step, both=both)
        applied.append(gradients(model))
    assert [stats.numel for stats in attachment.stats] == [sum(p.numel() for p in model.parameters())]
    assert "second.weight" not in applied[1]
    assert_same(total(*applied, kept(attachment)), total(given(0), given(1, both=False), given(2)))


def test_a_function_gets_each_step_and_its_error_leaves_the_updates() -> None:
    seen: list[micro.StepSummary] = []
    model, attachment = attached(on_step=seen.append)
    backward(model, 0)
    assert [summary.step for summary in seen] == [0]
    assert seen[0].density == attachment.summary.density
    assert seen[0].exposed_s == attachment.exposed_s > 0
    assert attachment.bucket_names == [(f"{name}.weight", f"{name}.bias") for name in ("body", "first", "second")]

    def fail(_: micro.StepSummary) -> None:
        raise KeyError("of on_step")

    other, _ = attached(on_step=fail)
    with pytest.raises(KeyError, match="of on_step"):
        backward(other, 0)
    assert_same(gradients(other), gradients(model))


def test_a_scaler_sees_an_overflow_and_residuals_follow_the_scale() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    model, attachment = attached(scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    backward(model, 0, factor=scaler.scale(torch.ones(())).item())
    waiting = kept(attachment)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    backward(model, 1, factor=float("inf"))
    assert attachment.skipped
    assert all(torch.isinf(gradient).all() for gradient in gradients(model).values())
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    optimizer.zero_grad()
    backward(model, 2, factor=2.0)
    expected = total({n: w / 2 for n, w in waiting.items()}, {n: 2 * g for n, g in given(2).items()})
    assert_same(total(gradients(model), kept(attachment)), expected)
    assert attachment.state_dict()["loss_scale"] == 2.0


def test_a_copy_of_an_attachment_says_that_it_is_attached_to_nothing() -> None:
    _, attachment = attached()
    for other in (copy.deepcopy(attachment), pickle.loads(pickle.dumps(attachment))):
        with pytest.raises(AttributeError, match="attached to no model"):
            other.close()


def test_what_cannot_work_is_refused_with_a_remedy() -> None:
    assert "clip must be positive" in refusal(clip=0.0)
    assert "clip_norm must be one of node, global, got 'rank'" in refusal(clip=1.0, clip_norm="rank")
    assert "clip_norm=global needs a clip" in refusal(clip_norm="global")
    assert "on_step must be callable" in refusal(on_step=3)
    assert "scaler must be a torch.amp.GradScaler" in refusal(scaler=2.0)
    assert "no trained parameter is called" in refusal(dense="nothing*")
    for reducer in (
        two_level := micro.TwoLevel(reducer=TOPK, ranks_per_node=1),
        micro.Split(reducer=two_level, only="*"),
    ):
        assert "where FSDP reduces already: give attach_fsdp the reducer in it" in refusal(reducer=reducer)
    assert "scope=model means nothing for dense" in refusal(reducer=micro.DenseReducer(), scope="model")
    assert "leave out offload_policy" in refusal(sharded_whole(offload_policy=CPUOffloadPolicy(pin_memory=False)))
    assert "no parameter that is trained" in refusal(sharded_whole().requires_grad_(False))


def test_tensor_parallelism_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(TwoHeads(), mesh["tensor"], {"body": ColwiseParallel()})
    assert "sharded over a mesh of 2 dimensions" in refusal(fully_shard(model, mesh=mesh["data"]))


def test_a_state_of_another_place_is_refused_by_name() -> None:
    model, attachment = attached()
    backward(model, 0)
    saved = attachment.state_dict()
    for change, words in (
        ({"world_size": 4}, "state is of world_size 4, this group has 1: shards of a node have no mean"),
        ({"rank": 1}, "state is of rank 1, this is rank 0"),
        ({"shard": [1, 2]}, "state is of shard 1 of 2, this rank has shard 0 of 1"),
        ({"scope": "model shard"}, "saved with scope=model shard"),
        ({"format": "other"}, "state must be what"),
    ):
        with pytest.raises(ValueError, match=words):
            attachment.load_state_dict(saved | change)
    with pytest.raises(ValueError, match="shards have no mean"):
        micro.average([saved], 2)
    _, other = attached(TOPK)
    with pytest.raises(ValueError, match="use the method that saved it"):
        other.load_state_dict(saved)
