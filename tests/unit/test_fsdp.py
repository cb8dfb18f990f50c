"""micro.attach_fsdp on a group of one rank: every kind of backward, its settings, and what it refuses."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import micro
from micro.drivers.gradient_watch import DISCARDED as NOTE
from micro.flat import Layout
from micro.fsdp.vectors import own, vector_of
from tests.refusals import refused
from tests.sharded_models import (
    REDUCER,
    SKIP,
    assert_same,
    attached,
    backward,
    given,
    gradients,
    kept,
    one_rank_mesh,
    sharded,
    total,
)
from tests.small_models import TwoHeads, batch

pytestmark = pytest.mark.usefixtures("one_rank")
TOPK = micro.SparseReducer(micro.TopK(), density=0.2)


def test_a_module_that_no_step_uses_gets_no_update_and_its_residual_waits() -> None:
    model, attachment = attached()
    backward(model, 0)
    first, waiting = gradients(model), kept(attachment)
    model.zero_grad()
    backward(model, 1, both=False)
    second = gradients(model)
    assert model.second.weight.grad is None
    assert torch.equal(kept(attachment)["second.weight"], waiting["second.weight"])
    model.zero_grad()
    backward(model, 2)
    expected = total(given(0), given(1, both=False), given(2))
    assert_same(total(first, second, gradients(model), kept(attachment)), expected)


class Parts(nn.Module):
    """An FSDP module of two layers, one of which is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(2))

    def forward(self, inputs: Tensor, *, both: bool = True) -> Tensor:
        return self.heads[0](inputs) + (self.heads[1](inputs) if both else 0.0)


def test_a_parameter_of_a_module_that_a_step_does_not_use_gets_no_update() -> None:
    whole = Parts()
    model = torch.distributed.fsdp.fully_shard(whole, mesh=one_rank_mesh())
    attachment = micro.attach_fsdp(model, REDUCER, replicas=one_rank_mesh())
    backward(model, 0)
    waiting = kept(attachment)
    model.zero_grad()
    backward(model, 1, both=False)
    assert set(gradients(model)) == {"heads.0.weight", "heads.0.bias"}
    assert torch.equal(kept(attachment)["heads.1.weight"], waiting["heads.1.weight"])
    assert not torch.equal(kept(attachment)["heads.0.weight"], waiting["heads.0.weight"])


def test_a_paused_backward_touches_no_residual() -> None:
    model, attachment = attached()
    backward(model, 0)
    model.zero_grad()
    before = kept(attachment)
    with attachment.paused():
        backward(model, 1)
    assert_same(gradients(model), given(1))
    assert_same(kept(attachment), before)
    model.zero_grad()
    backward(model, 2)
    assert_same(total(gradients(model), kept(attachment)), total(before, given(2)))


def test_a_paused_backward_that_is_not_removed_is_part_of_the_next_step_and_no_optimizer_steps_before() -> None:
    model, attachment = attached()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attachment.paused():
        backward(model, 0)
    with pytest.raises(ValueError, match=r"are this node's own.*zero_grad\(\) before the optimizer steps") as caught:
        optimizer.step()
    assert "\n" not in str(caught.value)
    backward(model, 1, both=False)
    optimizer.step()
    assert_same(total(gradients(model), kept(attachment)), total(given(0), given(1, both=False)))
    with attachment.paused():
        backward(model, 2)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    attachment.close()


@pytest.mark.parametrize("setting", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_micro_batches_whose_gradients_wait_are_one_step(setting: str) -> None:
    model, attachment = attached()
    wait: Callable[[bool], None] = getattr(model, setting)
    wait(False)
    backward(model, 0)
    wait(True)
    backward(model, 1)
    assert attachment.state_dict()["step"] == 1
    assert_same(total(gradients(model), kept(attachment)), total(given(0), given(1)))


class Blocks(nn.Module):
    """Blocks whose activations are computed again in backward."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def blocks(reentrant: bool | None, reducer: micro.Reducer = REDUCER) -> tuple[nn.Module, micro.ShardedAttachment]:
    model = Blocks(reentrant)
    for block in model.blocks:
        torch.distributed.fsdp.fully_shard(block, mesh=one_rank_mesh())
    torch.distributed.fsdp.fully_shard(model, mesh=one_rank_mesh())  # has no parameters of its own
    return model, micro.attach_fsdp(model, reducer, replicas=one_rank_mesh())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_activations_change_no_update(reentrant: bool) -> None:
    (model, attachment), (plain, _) = blocks(reentrant), blocks(None)
    for step in range(3):
        for each in (model, plain):
            each.zero_grad()
            backward(each, step)
        assert_same(gradients(model), gradients(plain))
        assert len(attachment.stats) == 3, "one end of backward, for all modules"
    with pytest.raises(micro.NonFiniteGradient, match=r"'blocks.*' on node 0 is not finite at step 3"):
        backward(model, 3, factor=float("nan"))
    assert not any(gradient.any() for gradient in gradients(model).values())
    model.zero_grad()
    backward(model, 4)
    assert all(torch.isfinite(gradient).all() for gradient in gradients(model).values())


def test_a_model_that_a_backward_uses_twice_is_reduced_once() -> None:
    model, attachment = attached()
    (model(batch(0)).square().sum() + model(batch(1)).square().sum()).backward()
    assert len(attachment.stats) == 3
    assert_same(total(gradients(model), kept(attachment)), total(given(0), given(1)))


def test_two_models_with_nan_in_one_backward_both_end() -> None:
    (one, first), (other, second) = attached(), attached()
    for _ in range(2):
        with pytest.raises(micro.NonFiniteGradient):
            ((one(batch(0)) + other(batch(0))).square().sum() * float("nan")).backward()
        assert first.skipped
        assert second.skipped
        assert not any(gradient.any() for model in (one, other) for gradient in gradients(model).values())
    with pytest.raises(micro.NonFiniteGradient):
        backward(other, 0, factor=float("nan"))


def test_a_backward_that_breaks_off_leaves_gradients_with_which_no_optimizer_steps() -> None:
    model, attachment = attached()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = model.body.register_full_backward_pre_hook(_fail)
    with pytest.raises(RuntimeError, match="breaks off"):
        backward(model, 0)
    handle.remove()
    with pytest.raises(ValueError, match="an exception broke off"):
        optimizer.step()
    optimizer.zero_grad()
    model.reset_iter_state() if hasattr(model, "reset_iter_state") else pytest.skip("this torch cannot go on")
    backward(model, 1)
    assert_same(total(gradients(model), kept(attachment)), given(1))
    model.zero_grad()
    with pytest.raises(micro.NonFiniteGradient):
        backward(model, 2, factor=float("nan"))


def _fail(*_: object) -> None:
    raise RuntimeError("backward breaks off")


def test_a_skipped_step_keeps_what_is_finite() -> None:
    model, attachment = attached(SKIP)
    handle = model.second.register_full_backward_pre_hook(lambda _module, grads: (grads[0] * float("nan"),))
    backward(model, 0)
    handle.remove()
    assert attachment.skipped
    assert not any(gradient.any() for gradient in gradients(model).values())
    expected = {name: gradient for name, gradient in given(0).items() if name.startswith("first")}
    assert_same({name: piece for name, piece in kept(attachment).items() if name.startswith("first")}, expected)


@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    ],
    ids=["parameters", "reduction"],
)
def test_nothing_is_lost_in_mixed_precision(policy: MixedPrecisionPolicy) -> None:
    model, plain = sharded(mp_policy=policy), sharded(mp_policy=policy)
    attachment = micro.attach_fsdp(model, REDUCER, replicas=one_rank_mesh())
    applied, expected = [], []
    for step in range(3):
        for each, found in ((model, applied), (plain, expected)):
            each.zero_grad()
            backward(each, step)
            found.append(gradients(each))
    assert {gradient.dtype for gradient in applied[0].values()} == {torch.float32}
    assert_same(total(*applied, kept(attachment)), total(*expected))


def test_a_parameter_that_is_frozen_or_trained_later_is_exchanged_while_it_is_trained() -> None:
    plain_model, model = sharded(), sharded()
    model.first.weight.requires_grad_(False)
    attachment = micro.attach_fsdp(model, REDUCER, replicas=one_rank_mesh())
    backward(model, 0)
    assert "first.weight" not in kept(attachment)
    model.first.weight.requires_grad_(True)
    model.second.weight.requires_grad_(False)
    waiting = kept(attachment)["second.weight"]
    model.zero_grad()
    backward(model, 1)
    backward(plain_model, 1)
    trained = {"first.weight": gradients(model)["first.weight"]}
    whole = total(trained, {"first.weight": kept(attachment)["first.weight"]})["first.weight"]
    torch.testing.assert_close(whole, gradients(plain_model)["first.weight"])
    assert torch.equal(kept(attachment)["second.weight"], waiting)


def test_gradients_that_are_thrown_away_make_a_note_and_those_of_a_paused_backward_none() -> None:
    def loop(*, paused: bool) -> list[str]:
        model, attachment = attached()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                optimizer.zero_grad()
                if paused:
                    with attachment.paused():
                        backward(model, 10 + step)
                else:
                    backward(model, 10 + step)
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
        attachment.close()
        return [str(each.message) for each in caught if str(each.message) == NOTE]

    assert loop(paused=False) == [NOTE]
    assert loop(paused=True) == []


@pytest.mark.slow
def test_a_compiled_model_has_the_updates_of_the_model_itself() -> None:
    (model, attachment), (plain, _) = attached(), attached()
    compiled = torch.compile(model, backend="eager")
    for step in range(2):
        for each in (compiled, plain):
            each.zero_grad()
            backward(each, step)
        assert_same(gradients(model), gradients(plain))
    again = sharded()
    second = micro.attach_fsdp(torch.compile(again, backend="eager"), REDUCER, replicas=one_rank_mesh())
    second.load_state_dict(attachment.state_dict())
    assert_same(kept(second), kept(attachment))


def test_an_optimizer_inside_of_backward_is_refused() -> None:
    def hook(_: Tensor) -> None:
        raise AssertionError("it ran before the exchange")

    model, attachment = attached()
    handle = model.first.weight.register_post_accumulate_grad_hook(hook)
    with pytest.raises(ValueError, match=r"parameter 'first.weight' has a post-accumulate-grad hook"):
        backward(model, 0)
    attachment.close()
    with pytest.raises(ValueError, match="step the optimizer after backward"):
        micro.attach_fsdp(model, REDUCER, replicas=one_rank_mesh())
    handle.remove()


def test_an_error_of_the_reducer_leaves_zeros_and_comes_back_until_the_attachment_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("of the reducer")

    model, attachment = attached()
    with monkeypatch.context() as patched:
        patched.setattr(micro.SparseReducer, "reduction", fail)
        with pytest.raises(ZeroDivisionError):
            backward(model, 0)
    assert not any(gradient.any() for gradient in gradients(model).values())
    with pytest.raises(ZeroDivisionError):
        backward(model, 1)
    attachment.close()
    model.zero_grad()
    backward(model, 2)
    assert_same(gradients(model), given(2))


def test_gradients_are_exchanged_in_the_memory_in_which_fsdp_leaves_them() -> None:
    model, _ = attached(micro.DenseReducer())
    backward(model, 0)
    backward(model, 1)
    parameters = {f"body.{name}": parameter for name, parameter in model.body.named_parameters()}
    layout = Layout.of(parameters)
    vector = vector_of(parameters, layout, frozenset(layout.names), torch.float32)
    assert vector.is_view
    assert vector.grad.data_ptr() == own(model.body.weight.grad).data_ptr()
    assert not vector_of(parameters, layout, frozenset(), torch.float32).is_view, "no update for what none has used"
    assert not vector_of(parameters, layout, frozenset(layout.names), torch.bfloat16).is_view


# --- its settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", ["node", "global"])
def test_clip_bounds_the_norm_of_the_whole_gradient(clip_norm: str) -> None:
    model, attachment = attached(micro.DenseReducer(), clip=0.5, clip_norm=clip_norm)
    backward(model, 0)
    expected = given(0)
    scale = 0.5 / float(torch.cat([gradient.flatten() for gradient in expected.values()]).norm())
    assert_same(gradients(model), {name: scale * gradient for name, gradient in expected.items()})
    attachment.clip = None
    model.zero_grad()
    backward(model, 0)
    assert_same(gradients(model), given(0))


def test_chosen_parameters_are_reduced_densely() -> None:
    model, attachment = attached(dense=["*.bias", "body*"])
    backward(model, 0)
    expected = given(0)
    for name, gradient in gradients(model).items():
        assert torch.allclose(gradient, expected[name]) == (name.endswith("bias") or name.startswith("body")), name
    assert set(kept(attachment)) == {"first.weight", "second.weight"}


@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_nothing_is_lost_in_any_scope(scope: str) -> None:
    model, attachment = attached(TOPK, scope=scope)
    applied = []
    for step, both in enumerate([True, False, True]):
        model.zero_grad()
        backward(model, step, both=both)
        applied.append(gradients(model))
    assert len(attachment.stats) == (1 if scope == "model" else 3)
    assert "second.weight" not in applied[1]
    assert_same(total(*applied, kept(attachment)), total(given(0), given(1, both=False), given(2)))


def test_a_function_gets_each_step_and_its_error_leaves_the_updates() -> None:
    seen: list[micro.StepSummary] = []
    model, attachment = attached(on_step=seen.append)
    backward(model, 0)
    assert [summary.step for summary in seen] == [0]
    assert seen[0].exposed_s == attachment.exposed_s > 0
    assert attachment.bucket_names == [(f"{name}.weight", f"{name}.bias") for name in ("body", "first", "second")]
    other, _ = attached(on_step=lambda _: {}["of on_step"])
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


def test_a_state_of_another_place_is_refused_by_name() -> None:
    model, attachment = attached()
    backward(model, 0)
    saved = attachment.state_dict()
    for change, key in (
        ({"world_size": 4}, "shards of a node have no mean"),
        ({"rank": 1}, "this is rank 0"),
        ({"shard": [1, 2]}, "this rank has shard 0 of 1"),
        ({"scope": "model shard"}, "saved with scope"),
        ({"format": "other"}, "state must be what"),
    ):
        refused(lambda change=change: attachment.load_state_dict(saved | change), key, "state")  # type: ignore[misc]
    refused(lambda: micro.average([saved], 2), "shards have no mean", "attach_fsdp")
    _, other = attached(TOPK)
    refused(lambda: other.load_state_dict(saved), "use the method that saved it", "topk")


# --- what is refused --------------------------------------------------------------------------------------------------


def whole(**settings: Any) -> nn.Module:
    return fully_shard(TwoHeads(), mesh=one_rank_mesh(), **settings)


def parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    return fully_shard(parallelize_module(TwoHeads(), mesh["tensor"], {"body": ColwiseParallel()}), mesh=mesh["data"])


def partly() -> nn.Module:
    model = TwoHeads()
    fully_shard(model.body)
    return model


TWO_LEVEL = micro.TwoLevel(reducer=TOPK, ranks_per_node=1)


@pytest.mark.parametrize(
    ("make", "settings", "key", "given"),
    [
        (whole, {"clip": 0.0}, "clip must be positive", 0.0),
        (whole, {"clip": 1.0, "clip_norm": "rank"}, "clip_norm", "rank"),
        (whole, {"on_step": 3}, "on_step", "int"),
        (whole, {"scaler": 2.0}, "scaler", "float"),
        (whole, {"dense": "nothing*"}, "no trained parameter is called", "nothing*"),
        (whole, {"reducer": TWO_LEVEL}, "two_level", "the reducer in it"),
        (whole, {"reducer": micro.Micro()}, "reducer", "Micro"),
        (whole, {"reducer": micro.DenseReducer(), "scope": "model"}, "scope=model", "dense"),
        (whole, {"scope": "layer"}, "scope", "layer"),
        (whole, {"replicas": None}, "replicas", "mesh['node']"),
        (lambda: whole(offload_policy=CPUOffloadPolicy(pin_memory=False)), {}, "offload_policy", "CPUOffloadPolicy"),
        (lambda: whole().requires_grad_(False), {}, "model", "no parameter that is trained"),
        (parallel, {}, "mesh of 2 dimensions", "fully_shard"),
        (partly, {}, "'first.weight' is not sharded", "fully_shard"),
        (TwoHeads, {}, "fully_shard", "TwoHeads"),
        (lambda: DistributedDataParallel(TwoHeads()), {}, "fully_shard", "use micro.attach"),
        (lambda: FullyShardedDataParallel(TwoHeads(), device_id=torch.device("cpu")), {}, "fully_shard", "FSDP1"),
        (lambda: attached()[0], {}, "all-reduce hook", "close the attachment"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(
    make: Callable[[], nn.Module], settings: dict[str, Any], key: str, given: Any
) -> None:
    model = make()
    arguments = {"reducer": REDUCER, "replicas": one_rank_mesh()} | settings
    refused(lambda: micro.attach_fsdp(model, **arguments), key, given)
