"""micro.attach on a group of one rank: its life, what DDP's models may be, and what it refuses."""

import copy
import gc
import io
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import micro
from micro import flat
from micro.comm import Comm
from micro.ddp.buckets import Bucket
from micro.ddp.checks import check_parameters, chosen_lane
from micro.drivers.lane import thread_lane
from micro.private_comm import NAMES_ARE_COUNTED, PrivateComm, _copied
from tests.products import grid
from tests.recorded_streams import recorded_streams
from tests.refusals import refused
from tests.small_models import flat_gradient

TIMEOUT, CPU = timedelta(seconds=77), torch.device("cpu")
TOPK = micro.SparseReducer(micro.TopK(), density=0.2)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def wrapped(module: nn.Module | None = None, **settings: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module or network(), **{"bucket_cap_mb": 1e-5} | settings)


def gradient(model: nn.Module, step: int = 0) -> Tensor:
    model.zero_grad()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).requires_grad_()
    model(x).abs().square().sum().backward()
    return flat_gradient(model)


def is_sparse(vector: Tensor) -> bool:
    return int((vector != 0).sum()) < vector.numel()


# --- its life ---------------------------------------------------------------------------------------------------------


def test_a_closed_model_trains_as_plain_ddp_and_is_attached_again_from_the_saved_state() -> None:
    model, uninterrupted = wrapped(), wrapped()
    micro.attach(uninterrupted, TOPK)
    with micro.attach(model, TOPK) as first:
        for step in range(3):
            assert torch.equal(gradient(model, step), gradient(uninterrupted, step))
        saved = first.state_dict()
    assert torch.equal(gradient(model), gradient(wrapped()))
    assert first.stats, "what was measured can still be read"
    first.close()
    second = micro.attach(model, TOPK)
    second.load_state_dict(saved)
    for step in range(3, 5):
        assert torch.equal(gradient(model, step), gradient(uninterrupted, step))
    micro.detach(model)
    assert torch.equal(gradient(model), gradient(wrapped()))
    refused(lambda: micro.detach(model), "model", "no attachment")


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
    made = micro.attach(wrapped(), TOPK).comm.group
    assert made is not None
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


def saved_and_loaded(model: DistributedDataParallel) -> Any:
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded, lambda model: AveragedModel(model).module])
def test_a_copy_of_an_attached_model_is_plain_ddp_and_can_be_attached(copied: Callable[[Any], Any]) -> None:
    model = wrapped()
    attachment = micro.attach(model, TOPK)
    gradient(model)
    twin = copied(model)
    assert torch.equal(gradient(twin), gradient(wrapped()))
    with micro.attach(twin, TOPK):
        assert is_sparse(gradient(twin))
    assert is_sparse(gradient(model, 1)), "the model lost its attachment"
    with pytest.raises(AttributeError, match="no 'stats': a copy of an attachment is attached to no model"):
        _ = copy.deepcopy(attachment).stats


# --- what the model may be --------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Blocks whose activations are computed again in backward, each in a backward of its own."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant else block(x)
        return x


def test_reentrant_checkpoints_give_the_updates_of_a_model_without_them_and_nan_stops_it_alone() -> None:
    model, plain = wrapped(Blocks(reentrant=True)), wrapped(Blocks(reentrant=False))
    attachment, _ = micro.attach(model, TOPK), micro.attach(plain, TOPK)
    for step in range(4):
        assert torch.equal(gradient(model, step), gradient(plain, step))
    assert len(attachment.bucket_names) > 1, "one bucket: a test of nothing"
    for number in range(3):
        weight: Any = model.module.blocks[number][0].weight  # type: ignore[index, union-attr]
        handle = weight.register_hook(lambda grad: grad * float("nan"))
        with pytest.raises(micro.NonFiniteGradient, match=rf"'blocks\.{number}\.0\.weight'"):
            gradient(model, 4)
        handle.remove()
        assert gradient(model, 5).isfinite().all()


@pytest.mark.parametrize("compiles", ["model", "ddp"])
def test_a_compiled_model_gives_the_same_bits(compiles: str) -> None:
    model, plain = (wrapped(bucket_cap_mb=25) for _ in range(2))
    forward: Any = model
    if compiles == "model":
        model = forward = wrapped(torch.compile(network(), backend="aot_eager"), bucket_cap_mb=25)  # type: ignore[arg-type]
    else:
        forward = torch.compile(model, backend="aot_eager")
    micro.attach(forward, TOPK)
    micro.attach(plain, TOPK)
    for step in range(4):
        model.zero_grad()
        forward(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).abs().square().sum().backward()
        assert torch.equal(flat_gradient(model), gradient(plain, step))


class Complex(nn.Module):
    """Complex parameters beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.waves = nn.Parameter(torch.randn(40, 4, dtype=torch.complex64))
        self.readout = nn.Linear(40, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        mixed: Tensor = self.readout((self.waves * inputs.sum(0).to(torch.complex64)).sum(1).abs())
        return mixed


def named(model: nn.Module) -> dict[str, Tensor]:
    parameters = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name: torch.view_as_real(p) if p.is_complex() else p for name, p in parameters.items()}


@grid(scope=["bucket", "tensor", "model"], unused=[False, True])
def test_nothing_of_a_complex_gradient_is_lost(scope: str, unused: bool) -> None:
    model, plain = wrapped(Complex(), find_unused_parameters=unused), Complex()
    attachment = micro.attach(model, micro.SparseReducer(micro.Micro(), density=0.1), scope=scope)
    applied, computed = [], []
    for step in range(3):
        for net, found in ((model, applied), (plain, computed)):
            net.zero_grad()
            net(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            found.append(named(model.module if net is model else net))
    saved = attachment.state_dict()
    for bucket in saved["buckets"]:
        for name, residual in bucket["memory"]["residual"].items():
            given, sent = (sum(each[name] for each in found) for found in (computed, applied))
            torch.testing.assert_close(residual.view_as(given) + sent, given, rtol=1e-4, atol=1e-3)
    reducer = micro.SparseReducer(micro.Micro(), density=0.1)
    restored = micro.attach(wrapped(Complex(), find_unused_parameters=unused), reducer, scope=scope)
    restored.load_state_dict(saved)
    pieces = [
        {name: piece for bucket in state["buckets"] for name, piece in bucket["memory"]["residual"].items()}
        for state in (saved, restored.state_dict())
    ]
    assert all(torch.equal(pieces[1][name], piece) for name, piece in pieces[0].items())


class WithEmpty(nn.Module):
    """Layers of 16, 4, 8 and 2 elements, and parameters without elements, which DDP gives buckets of their own."""

    def __init__(self, *empty: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = network()
        self.empty = nn.ParameterList([nn.Parameter(torch.zeros(0, dtype=dtype)) for dtype in empty])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x + sum(empty.sum().float() for empty in self.empty))
        return y + sum(empty.sum().float() for empty in self.empty)


@grid(empty=[(), (torch.float64,), (torch.float32, torch.bfloat16)], clip=[None, 1e6], most=[flat.MAX_NUMEL, 20])
def test_buckets_without_elements_or_too_long_for_indices_lose_nothing(
    monkeypatch: pytest.MonkeyPatch, empty: tuple[torch.dtype, ...], clip: float | None, most: int
) -> None:
    monkeypatch.setattr(flat, "MAX_NUMEL", most)
    model, plain = wrapped(WithEmpty(*empty), bucket_cap_mb=25), WithEmpty(*empty)
    with micro.attach(model, TOPK, clip=clip) as attachment:
        lost = sum(gradient(plain, step).float() - gradient(model, step).float() for step in range(4))
        left = torch.as_tensor(lost).sum() - torch.cat(attachment.residuals()).sum()
    torch.testing.assert_close(left, torch.zeros(()), rtol=0, atol=1e-5)


def test_a_bucket_that_does_not_fit_its_layout_is_refused_before_a_kernel_writes_to_it() -> None:
    layout, grad = micro.Layout.flat(10, "weight"), torch.ones(20)
    refused(Bucket(layout, grad, grad, None).check, "'weight' holds 20 elements", 10)
    refused(lambda: TOPK.reduce_(TOPK.start(layout, torch.float32, CPU), grad, Comm()), "residual's 10 elements", 20)


def test_the_lane_is_the_callers_where_backward_has_collectives_of_its_own_on_a_gpu_or_the_mean_is_one_sum() -> None:
    assert chosen_lane("auto", wrapped(), micro.DenseReducer()) == "caller"
    assert chosen_lane("auto", wrapped(), TOPK) == "thread"
    assert chosen_lane("auto", wrapped(find_unused_parameters=True), micro.DenseReducer()) == "thread"


def test_models_on_one_accelerator_share_a_lane_until_the_last_is_closed() -> None:
    """Two models in one backward then launch their collectives in one order, the same on all ranks."""
    with recorded_streams():
        first, second = thread_lane(torch.device("cuda", 0)), thread_lane(torch.device("cuda", 0))
        assert first is second
        first.close()
        reached = threading.Event()
        second.put(reached.set)
        assert reached.wait(20)
        second.close()
        third = thread_lane(torch.device("cuda", 0))
        assert third is not first
        third.close()
    one, other = thread_lane(CPU), thread_lane(CPU)
    assert one is not other
    one.close()
    other.close()


# --- what is refused --------------------------------------------------------------------------------------------------


def with_optimize_ddp() -> DistributedDataParallel:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return wrapped()


def mixed() -> DistributedDataParallel:
    model = wrapped()
    model.mixed_precision = _MixedPrecision(param_dtype=torch.float16)  # DDP itself takes it on an accelerator only
    return model


def hooked() -> DistributedDataParallel:
    model = wrapped()
    model.register_comm_hook(None, allreduce_hook)
    return model


def attached() -> DistributedDataParallel:
    model = wrapped()
    micro.attach(model, TOPK)
    return model


def sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))


def replicated() -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(nn.Linear(4, 4))


SPLIT = micro.Split(reducer=TOPK, min_dims=2)


@pytest.mark.parametrize(
    ("make", "settings", "key", "given"),
    [
        (wrapped, {"reducer": micro.Micro()}, "reducer", "Micro"),
        (wrapped, {"reducer": "micro"}, "reducer", "micro"),
        (wrapped, {"reducer": micro.SparseReducer}, "reducer", "SparseReducer"),
        (wrapped, {"reducer": SPLIT, "dense": "x"}, "reducer split", "only, dense"),
        *((wrapped, {"clip": clip}, "clip", clip) for clip in ("a", True, 0, -1.0, float("nan"))),
        (wrapped, {"clip": 1.0, "clip_norm": "all"}, "clip_norm", "all"),
        (wrapped, {"clip_norm": "global"}, "clip_norm", "clip"),
        (wrapped, {"process_group": "gloo"}, "process_group", "gloo"),
        (wrapped, {"lane": "stream"}, "lane", "stream"),
        (wrapped, {"on_step": 3}, "on_step", "int"),
        (wrapped, {"scope": "layer"}, "scope", "layer"),
        (wrapped, {"reducer": micro.DenseReducer(), "scope": "tensor"}, "scope=tensor", "dense"),
        (wrapped, {"only": lambda name, p: False}, "only", "trained parameters"),
        (lambda: wrapped(nn.Sequential(nn.Embedding(4, 2, sparse=True))), {}, "'0'", "sparse"),
        (with_optimize_ddp, {}, "model", "python_reducer"),
        (mixed, {}, "mixed_precision", "torch.autocast"),
        (hooked, {}, "model", "communication hook"),
        (attached, {}, "model", "micro.detach"),
        (network, {}, "DistributedDataParallel", "micro.LocalSteps"),
        (sharded, {}, "DistributedDataParallel", "micro.attach_fsdp"),
        (replicated, {}, "DistributedDataParallel", "replicate"),
    ],
)
def test_what_cannot_work_is_refused_and_leaves_nothing(
    make: Callable[[], nn.Module], settings: dict[str, Any], key: str, given: Any
) -> None:
    model = make()
    threads, groups = set(threading.enumerate()), len(dist.distributed_c10d._world.pg_map)
    refused(lambda: micro.attach(model, **{"reducer": TOPK} | settings), key, given)
    assert set(threading.enumerate()) <= threads
    assert len(dist.distributed_c10d._world.pg_map) == groups


def test_what_only_some_models_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped()
    refused(lambda: micro.attach(model, TOPK, process_group=model.process_group), "process_group", "the model's own")
    several = {"a": torch.zeros(2), "b": torch.zeros(2, device="meta")}
    refused(lambda: check_parameters(several, whole_model=False), "parameters", "cpu, meta")
    attachment = micro.attach(wrapped(), TOPK)
    refused(lambda: setattr(attachment, "clip", -1.0), "clip", -1.0)
    monkeypatch.setattr(flat, "MAX_NUMEL", 20)
    refused(lambda: micro.attach(model, TOPK, scope="model"), "scope", 20)
    monkeypatch.setattr(flat, "MAX_NUMEL", 10)
    refused(lambda: micro.attach(model, TOPK), "'0.weight'", 10)
