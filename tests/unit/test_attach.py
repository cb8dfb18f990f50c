"""micro.attach on a group of one rank: its life, what DDP's models may be, what is chosen, and what it refuses."""

import argparse
import copy
import gc
import io
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import micro
from micro.comm.group import PrivateComm
from micro.comm.process_groups import NAMES_ARE_COUNTED, _copied
from micro.comm.ranks import Comm
from micro.ddp.backward import Bucket
from micro.ddp.checks import check_parameters
from micro.drivers.lane import thread_lane
from micro.values import flat
from tests.products import grid
from tests.recorded_streams import recorded_streams
from tests.refusals import NOTHING, refused
from tests.sharded_models import attached_by, sharded
from tests.small_models import TwoHeads, assert_same, chain, given, gradient, gradients, kept, total, wrapped

pytestmark = pytest.mark.usefixtures("one_rank")
TIMEOUT, CPU = timedelta(seconds=77), torch.device("cpu")
TOPK = micro.SparseReducer(micro.TopK(), density=0.2)
MICRO = micro.SparseReducer(micro.Micro(), density=0.2)


# --- its life ---------------------------------------------------------------------------------------------------------


def test_a_closed_model_trains_as_plain_ddp_and_is_attached_again_from_the_saved_state() -> None:
    model, uninterrupted = wrapped(), wrapped()
    micro.attach(uninterrupted, TOPK)
    with micro.attach(model, TOPK) as first:
        for step in range(3):
            assert torch.equal(gradient(model, step), gradient(uninterrupted, step))
        saved = first.state_dict()
    assert torch.equal(gradient(model, 0), gradient(TwoHeads(), 0))
    assert first.stats, "what was measured can still be read"
    first.close()
    second = micro.attach(model, TOPK)
    second.load_state_dict(saved)
    for step in range(3, 5):
        assert torch.equal(gradient(model, step), gradient(uninterrupted, step))
    micro.detach(model)
    assert torch.equal(gradient(model, 0), gradient(TwoHeads(), 0))
    refused(lambda: micro.detach(model), "model", "no attachment")


@pytest.mark.slow
@pytest.mark.parametrize("closes", [True, False])
def test_attachments_leave_no_thread_and_no_file(*, closes: bool) -> None:
    if not closes and torch.__version__ < NAMES_ARE_COUNTED:
        pytest.skip("such groups stay open in this torch")
    counts = []
    for step in range(8):
        model = wrapped()
        attachment = micro.attach(model, TOPK)
        gradient(model, step)
        if closes:
            attachment.close()
        del model, attachment
        gc.collect()
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    grown = [after - before for before, after in zip(counts[0], counts[-1], strict=True)]
    assert max(grown) < len(counts) - 1, counts  # torch may start a thread once, but nothing stays of each model


def test_groups_are_made_like_the_models_own_and_one_of_the_users_is_left() -> None:
    made = micro.attach(wrapped(process_group=dist.new_group(timeout=TIMEOUT)), TOPK).comm.group
    assert made._get_backend(CPU).options._timeout == TIMEOUT
    own = dist.new_group([0], backend="cpu:gloo,cuda:gloo")
    with micro.attach(wrapped(), TOPK, process_group=own) as attachment:
        assert attachment.comm.group is own
    assert dist.get_world_size(own) == 1
    with pytest.raises(RuntimeError, match="the process group was given up"):
        _ = attachment.comm.group
    PrivateComm(own, CPU).close()


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch that was built with NCCL")
def test_the_options_of_nccl_are_copied() -> None:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout, options.config.max_ctas = TIMEOUT, 3
    copied: Any = _copied(options)
    assert copied is not options
    assert (copied.is_high_priority_stream, copied._timeout, copied.config.max_ctas) == (True, TIMEOUT, 3)


def saved_and_loaded(given: Any) -> Any:
    stored = io.BytesIO()
    torch.save(given, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_a_copy_of_an_attached_model_is_plain_ddp_and_can_be_attached(copied: Callable[[Any], Any]) -> None:
    model = wrapped()
    attachment = micro.attach(model, TOPK)
    gradient(model, 0)
    twin = copied(model)
    assert torch.equal(gradient(twin, 0), gradient(TwoHeads(), 0))
    with micro.attach(twin, TOPK):
        assert (gradient(twin, 0) == 0).any()
    assert (gradient(model, 1) == 0).any(), "the model lost its attachment"
    for twins in (copy.copy(attachment), copy.deepcopy(attachment)):
        with pytest.raises(AttributeError, match=r"no 'stats': .* attached to no model"):
            _ = twins.stats


def test_a_pickled_attachment_says_that_it_is_no_saved_state_when_it_is_saved_and_when_it_is_used() -> None:
    """Programs save all that is in their arguments, on rank 0 alone, where an error would leave the others waiting."""
    with micro.attach(wrapped(), TOPK) as attachment:
        with pytest.warns(UserWarning, match=r"no saved state.*state_dict"):
            restored = saved_and_loaded(argparse.Namespace(lr=0.1, attachment=attachment))
        with pytest.raises(AttributeError, match=r"no 'state_dict': .* no saved state"):
            restored.attachment.state_dict()
        with pytest.raises(ValueError, match="CopiedDriver"):
            attachment.load_state_dict(restored.attachment)


def test_a_model_without_parameters_as_after_a_forward_over_dtensors_is_refused_in_one_line() -> None:
    """torch's hooks for DTensors in DDP set plain tensors where parameters were."""
    model = wrapped()
    for module in model.module.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            setattr(module, name, parameter.detach().requires_grad_())
    with pytest.raises(ValueError, match="before"):
        micro.attach(model, TOPK)


# --- what the model may be --------------------------------------------------------------------------------------------


class Blocks(nn.Sequential):
    """Blocks whose activations are computed again in backward, each in a backward of its own if re-entrant."""

    def __init__(self, reentrant: bool | None) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for block in self:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@grid(driver=["ddp", "fsdp"], reentrant=[True, False])
def test_checkpointed_activations_change_no_update_and_nan_stops_the_model_alone(driver: str, reentrant: bool) -> None:
    (model, attachment), (other, _) = (attached_by(driver, TOPK, Blocks(how)) for how in (reentrant, None))
    for step in range(3):
        assert_same(given(model, step), given(other, step), rtol=0, atol=0)
    assert len(attachment.stats) == 3, "one end of backward, for all blocks"
    for block in getattr(model, "module", model):
        handle = block.register_full_backward_pre_hook(lambda _, grads: (grads[0] * float("nan"),))
        with pytest.raises(micro.NonFiniteGradient, match=r"'\d\.0\..* is not finite at step"):
            gradient(model, 3)
        handle.remove()
        assert all(grad.isfinite().all() for grad in given(model, 4).values())


@grid(
    driver=["ddp", "fsdp"],
    reducer=[micro.PowerSGD(rank=1), micro.build(micro.Reducer, {"name": "dct", "density": 0.2})],
)
def test_a_backward_inside_of_autocast_has_the_updates_of_one_outside(driver: str, reducer: micro.Reducer) -> None:
    settings: dict[str, Any] = {"lane": "caller"} if driver == "ddp" else {}
    (model, one), (other, two) = (attached_by(driver, reducer, Scaled(), **settings) for _ in range(2))
    for _ in range(2):
        for each, is_enabled in ((model, True), (other, False)):
            each.zero_grad()
            loss = each(torch.ones(20)).square().sum()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
                loss.backward()
        assert_same(gradients(model), gradients(other), rtol=0, atol=0)
    assert_same(kept(one), kept(two), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("compiles", ["model", "ddp"])
def test_a_compiled_model_gives_the_same_bits(compiles: str) -> None:
    plain, inner = wrapped(chain(), bucket_cap_mb=25), chain()
    forward: Any = wrapped(
        torch.compile(inner, backend="aot_eager") if compiles == "model" else inner, bucket_cap_mb=25
    )
    forward = torch.compile(forward, backend="aot_eager") if compiles == "ddp" else forward
    micro.attach(forward, TOPK)
    micro.attach(plain, TOPK)
    for step in range(4):
        assert torch.equal(gradient(forward, step), gradient(plain, step))
    torch._dynamo.reset()


def test_a_static_graph_ends_its_backwards_where_a_layer_was_frozen_after_ddp_was_built() -> None:
    for frozen in (0, 2):
        model = wrapped(chain(), static_graph=True)
        model.module[frozen].requires_grad_(False)
        attachment = micro.attach(model, TOPK)
        for step in range(4):
            gradient(model, step)
            assert attachment.stats[0].step == step


class Scaled(nn.Module):
    """A matrix without products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.randn(30, 20, generator=torch.Generator().manual_seed(0)))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.factors * inputs


class Complex(nn.Module):
    """Complex and real parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.waves = nn.Parameter(torch.randn(40, 6, dtype=torch.complex64))
        self.readout = nn.Linear(40, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        mixed: Tensor = self.readout((self.waves * inputs.sum(0).to(torch.complex64)).sum(1).abs())
        return mixed


@grid(make=[TwoHeads, Complex], scope=["bucket", "tensor", "model"], clip=[None, 1e6], unused=[False, True])
def test_nothing_of_the_gradient_is_lost(make: type[nn.Module], scope: str, clip: float | None, unused: bool) -> None:
    model, again = (wrapped(make(), find_unused_parameters=unused) for _ in range(2))
    reducer = TOPK if scope == "tensor" else MICRO
    attachment, applied = micro.attach(model, reducer, scope=scope, clip=clip), []
    for step in range(3):
        gradient(model, step)
        applied.append(gradients(model))
    assert_same(total(*applied, kept(attachment)), given(make(), 0, 1, 2), rtol=1e-4, atol=1e-2)
    assert sum(stats.global_count for stats in attachment.stats) < sum(stats.numel for stats in attachment.stats)
    restored = micro.attach(again, reducer, scope=scope, clip=clip)
    restored.load_state_dict(attachment.state_dict())
    assert_same(kept(restored), kept(attachment), rtol=0, atol=0)


class WithEmpty(TwoHeads):
    """Also has parameters without elements, which DDP gives buckets of their own."""

    def __init__(self, *empty: torch.dtype) -> None:
        super().__init__()
        self.empty = nn.ParameterList([nn.Parameter(torch.zeros(0, dtype=dtype)) for dtype in empty])

    def forward(self, inputs: Tensor, *, both: bool = True) -> Tensor:
        return super().forward(inputs, both=both) + sum(empty.sum().float() for empty in self.empty)


@grid(empty=[(), (torch.float64,), (torch.float32, torch.bfloat16)], clip=[None, 1e6], most=[flat.MAX_NUMEL, 60])
def test_buckets_without_elements_or_too_long_for_indices_lose_nothing(
    monkeypatch: pytest.MonkeyPatch, empty: tuple[torch.dtype, ...], clip: float | None, most: int
) -> None:
    monkeypatch.setattr(flat, "MAX_NUMEL", most)
    model, plain = wrapped(WithEmpty(*empty), bucket_cap_mb=25), WithEmpty(*empty)
    with micro.attach(model, TOPK, clip=clip) as attachment:
        lost = sum(gradient(plain, step).float() - gradient(model, step).float() for step in range(4))
        left = torch.as_tensor(lost).sum() - torch.cat(attachment.residuals()).sum()
    torch.testing.assert_close(left, torch.zeros(()), rtol=0, atol=1e-3)


def test_a_bucket_that_does_not_fit_its_layout_is_refused_before_a_kernel_writes_to_it() -> None:
    layout, grad = micro.Layout.flat(10, "weight"), torch.ones(20)
    refused(Bucket(layout, grad, grad, None).check, "'weight' holds 20 elements", 10)
    refused(lambda: TOPK.reduce_(TOPK.start(layout, torch.float32, CPU), grad, Comm()), "residual's 10 elements", 20)


def test_models_on_one_accelerator_share_a_lane_until_the_last_is_closed() -> None:
    """Two models in one backward then launch their collectives in one order, the same on all ranks."""
    device, reached = torch.device("cuda", 0), threading.Event()
    with recorded_streams():
        first, second = thread_lane(device), thread_lane(device)
        assert first is second
        first.close()
        second.put(reached.set)
        assert reached.wait(20)
        second.close()
        third = thread_lane(device)
        assert third is not first
        third.close()


# --- what is refused --------------------------------------------------------------------------------------------------


def with_optimize_ddp() -> DistributedDataParallel:
    from torch._dynamo import config  # slow to import

    with config.patch(optimize_ddp="python_reducer"):
        return wrapped()


def mixed() -> DistributedDataParallel:
    model = wrapped()
    model.mixed_precision = _MixedPrecision(param_dtype=torch.float16)  # DDP itself takes it on an accelerator only
    return model


def leaving_out() -> DistributedDataParallel:
    model = wrapped()
    model.skip_all_reduce_unused_params = True  # an argument of DDP since torch 2.15
    return model


def hooked() -> DistributedDataParallel:
    model = wrapped()
    model.register_comm_hook(None, allreduce_hook)
    return model


def attached() -> DistributedDataParallel:
    model = wrapped()
    micro.attach(model, TOPK)
    return model


SPLIT = micro.Split(reducer=TOPK, min_dims=2)


@pytest.mark.parametrize(
    ("make", "settings", "key", "value"),
    [
        (wrapped, {"reducer": micro.Micro()}, "reducer", "Micro"),
        (wrapped, {"reducer": micro.SparseReducer}, "reducer", "SparseReducer"),
        (wrapped, {"reducer": SPLIT, "dense": "x"}, "reducer split", "only, dense"),
        *((wrapped, {"clip": clip}, "clip", clip) for clip in ("a", True, 0, -1.0, float("nan"))),
        (wrapped, {"clip": 1.0, "clip_norm": "all"}, "clip_norm", "all"),
        (wrapped, {"clip_norm": "global"}, "clip_norm", "clip"),
        (wrapped, {"process_group": "gloo"}, "process_group", "gloo"),
        (wrapped, {"on_step": 3}, "on_step", "int"),
        (wrapped, {"scope": "layer"}, "scope", "layer"),
        (wrapped, {"lane": "stream"}, "lane", "stream"),
        (wrapped, {"reducer": micro.DenseReducer(), "scope": "tensor"}, "scope=tensor", "dense"),
        (wrapped, {"reducer": micro.SparseReducer(micro.Micro(), 0.1), "scope": "tensor"}, "messages", "scope=bucket"),
        (wrapped, {"only": lambda name, p: False}, "only", "trained parameters"),
        (wrapped, {"only": "*.weight", "dense": ["first.*"]}, "both dense and only", "first.weight"),
        (wrapped, {"dense": "*norm*"}, "dense", "*norm*"),
        (wrapped, {"dense": "*"}, "use reducer dense", NOTHING),
        (wrapped, {"start_step": -1}, "start_step", -1),
        (lambda: wrapped(nn.Sequential(nn.Embedding(4, 2, sparse=True))), {}, "'0'", "sparse"),
        (with_optimize_ddp, {}, "model", "python_reducer"),
        (mixed, {}, "mixed_precision", "torch.autocast"),
        (leaving_out, {}, "skip_all_reduce_unused_params", NOTHING),
        (lambda: wrapped().requires_grad_(False), {}, "no parameter that is trained now", NOTHING),
        (hooked, {}, "model", "communication hook"),
        (attached, {}, "model", "micro.detach"),
        (TwoHeads, {}, "DistributedDataParallel", "micro.LocalSteps"),
        (sharded, {}, "DistributedDataParallel", "micro.attach_fsdp"),
        (lambda: replicate(TwoHeads()), {}, "DistributedDataParallel", "replicate"),
    ],
)
def test_what_cannot_work_is_refused_and_leaves_nothing(
    make: Callable[[], nn.Module], settings: dict[str, Any], key: str, value: Any
) -> None:
    model = make()
    threads, groups = set(threading.enumerate()), len(dist.distributed_c10d._world.pg_map)
    refused(lambda: micro.attach(model, **{"reducer": TOPK} | settings), key, value)
    assert set(threading.enumerate()) <= threads
    assert len(dist.distributed_c10d._world.pg_map) == groups


def test_what_only_some_models_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped()
    refused(lambda: micro.attach(model, TOPK, process_group=model.process_group), "process_group", "the model's own")
    several = {"a": torch.zeros(2), "b": torch.zeros(2, device="meta")}
    refused(lambda: check_parameters(several, whole_model=False), "parameters", "cpu, meta")
    attachment = micro.attach(wrapped(), TOPK)
    refused(lambda: setattr(attachment, "clip", -1.0), "clip", -1.0)
    monkeypatch.setattr(flat, "MAX_NUMEL", 60)
    refused(lambda: micro.attach(model, TOPK, scope="model"), "scope", 60)
    monkeypatch.setattr(flat, "MAX_NUMEL", 10)
    refused(lambda: micro.attach(model, TOPK), "'body.weight'", 10)
