"""What attach refuses, on a group of one rank: in one line, and nothing is left behind."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import micro
from micro import flat
from micro.ddp.checks import check_parameters, chosen_lane
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("one_rank")

GOOD = micro.SparseReducer(micro.Micro(), density=0.2)


def wrapped(module: nn.Module | None = None) -> DistributedDataParallel:
    return DistributedDataParallel(module or nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))


def attach_refused(model: DistributedDataParallel, key: str, given: Any, reducer: Any = GOOD, **settings: Any) -> None:
    """Check that attach refuses a model or a setting, and leaves no thread and no group."""
    threads, groups = set(threading.enumerate()), len(dist.distributed_c10d._world.pg_map)
    refused(lambda: micro.attach(model, reducer, **settings), key, given)
    assert set(threading.enumerate()) <= threads
    assert len(dist.distributed_c10d._world.pg_map) == groups


@pytest.mark.parametrize(
    ("reducer", "given"),
    [(micro.Micro(), "Micro"), ("micro", "micro"), (None, None), (micro.SparseReducer, "SparseReducer")],
)
def test_what_is_no_reducer_is_refused(reducer: object, given: object) -> None:
    model = wrapped()
    attach_refused(model, "reducer", str(given), reducer)
    micro.attach(model, GOOD)


@pytest.mark.parametrize("clip", ["a", True, 0, -1.0, float("nan"), torch.ones(2)])
def test_what_is_no_limit_of_a_norm_is_refused(clip: Any) -> None:
    model = wrapped()
    attach_refused(model, "clip", clip, clip=clip)
    attachment = micro.attach(model, GOOD)
    refused(lambda: setattr(attachment, "clip", clip), "clip", clip)


@pytest.mark.parametrize(("settings", "given"), [({"process_group": "gloo"}, "gloo"), ({"lane": "stream"}, "stream")])
def test_a_setting_that_is_none_is_refused(settings: dict[str, Any], given: str) -> None:
    attach_refused(wrapped(), next(iter(settings)), given, **settings)


def test_the_model_s_own_group_is_refused() -> None:
    model = wrapped()
    attach_refused(model, "process_group", "the model's own", process_group=model.process_group)


def compiled_autograd() -> DistributedDataParallel:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return wrapped()


def mixed() -> DistributedDataParallel:
    model = wrapped()
    model.mixed_precision = _MixedPrecision(param_dtype=torch.float16)  # DDP itself takes it on an accelerator only
    return model


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: wrapped(nn.Embedding(4, 2, sparse=True)), "Embedding"),
        (lambda: wrapped(nn.Sequential(nn.Embedding(4, 2, sparse=True))), "'0'"),
        (compiled_autograd, "python_reducer"),
        (mixed, "mixed_precision"),
    ],
)
def test_a_model_that_cannot_be_reduced_is_refused(make: Callable[[], DistributedDataParallel], key: str) -> None:
    attach_refused(make(), key, key)


def sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: nn.Module = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    return model


def replicated() -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("build", "remedy"),
    [
        (lambda: nn.Linear(4, 4), "micro.LocalSteps"),
        (sharded, "micro.attach_fsdp"),
        (replicated, "replicate, which is not supported"),
    ],
)
def test_a_model_in_no_ddp_is_refused_with_what_fits_it(build: Callable[[], nn.Module], remedy: str) -> None:
    with pytest.raises(ValueError, match="model must be wrapped in DistributedDataParallel") as caught:
        micro.attach(build(), GOOD)
    assert remedy in str(caught.value)


def test_collectives_of_backward_are_seen() -> None:
    dense, syncing = micro.DenseReducer(), nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    assert chosen_lane("auto", wrapped(), dense) == "caller"
    assert chosen_lane("auto", DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True), dense) == "thread"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.SyncBatchNorm, "_passing_sync_batchnorm_handle", lambda *_: None, raising=False)
        model = wrapped()
        model.module.append(syncing)
        assert chosen_lane("auto", model, dense) == "thread"


def test_parameters_on_several_devices_are_refused() -> None:
    parameters = {"a": torch.zeros(2), "b": torch.zeros(2, device="meta")}
    refused(lambda: check_parameters(parameters, whole_model=False), "parameters", "cpu, meta")


@pytest.mark.parametrize(("most", "settings", "key"), [(20, {"scope": "model"}, "scope"), (10, {}, "0.weight")])
def test_vectors_that_indices_cannot_count_are_refused(
    most: int, settings: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat, "MAX_NUMEL", most)  # the model has parameters of 16, 4, 8 and 2 elements
    attach_refused(wrapped(), key, most, **settings)
