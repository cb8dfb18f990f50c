"""What attach refuses, on a group of one rank: in one line, and nothing is left behind."""

import threading
from collections.abc import Callable

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import micro
from micro import flat
from micro.ddp.checks import check_parameters, has_collectives

pytestmark = pytest.mark.usefixtures("one_rank")

GOOD = micro.SparseReducer(micro.Micro(), density=0.2)


def wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))


def refusal(model: DistributedDataParallel, attach: Callable[[DistributedDataParallel], object]) -> str:
    """Return the words of the error; check that they are one line, and that the model is as it was."""
    threads, groups = set(threading.enumerate()), len(dist.distributed_c10d._world.pg_map)
    with pytest.raises(ValueError, match=r".+") as caught:
        attach(model)
    assert set(threading.enumerate()) <= threads
    assert len(dist.distributed_c10d._world.pg_map) == groups
    assert "\n" not in str(caught.value)
    return str(caught.value)


BUILD_ONE = "build one, as in micro.SparseReducer(micro.Micro(), density=0.01)"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            micro.Micro(),
            "got the selector Micro: wrap it, as in micro.SparseReducer(micro.Micro(), density=0.01)",
        ),
        ("micro", f"got 'micro': {BUILD_ONE}"),
        (None, f"got None: {BUILD_ONE}"),
        (micro.SparseReducer, f"got the class SparseReducer: {BUILD_ONE}"),
    ],
)
def test_what_is_no_reducer_is_refused(given: object, words: str) -> None:
    model = wrapped()
    said = refusal(model, lambda model: micro.attach(model, given))  # type: ignore[arg-type]
    assert said == f"reducer must be a micro.Reducer, {words}"
    micro.attach(model, GOOD)


@pytest.mark.parametrize("clip", ["a", True, 0, -1.0, float("nan"), torch.ones(2)])
def test_what_is_no_limit_of_a_norm_is_refused(clip: object) -> None:
    model = wrapped()
    said = refusal(model, lambda model: micro.attach(model, GOOD, clip=clip))  # type: ignore[arg-type]
    assert said == f"clip must be positive, got {clip!r}: leave it out to disable clipping"
    attachment = micro.attach(model, GOOD)
    with pytest.raises(ValueError, match="clip must be positive"):
        attachment.clip = clip  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("module", "where"),
    [
        (nn.Embedding(4, 2, sparse=True), "the model, an Embedding, makes"),
        (nn.Sequential(nn.Embedding(4, 2, sparse=True)), "'0' makes"),
    ],
)
def test_sparse_gradients_are_refused_with_the_name_of_their_module(module: nn.Module, where: str) -> None:
    said = refusal(DistributedDataParallel(module), lambda model: micro.attach(model, GOOD))
    assert said == f"gradients must be dense tensors, {where} sparse ones: build it with sparse=False"


def test_a_model_for_compiled_autograd_is_refused() -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = wrapped()
    said = refusal(model, lambda model: micro.attach(model, GOOD))
    assert said.startswith("model was wrapped while torch._dynamo.config.optimize_ddp was 'python_reducer'")


def test_mixed_precision_of_ddp_is_refused() -> None:
    model = wrapped()
    model.mixed_precision = _MixedPrecision(param_dtype=torch.float16)  # DDP itself takes it on an accelerator only
    said = refusal(model, lambda model: micro.attach(model, GOOD))
    assert said.startswith("mixed_precision of DDP brings a communication hook of its own")


def test_a_group_that_does_not_fit_is_refused() -> None:
    model = wrapped()
    attach = micro.attach
    said = refusal(model, lambda model: attach(model, GOOD, process_group="gloo"))  # type: ignore[arg-type]
    assert said.startswith("process_group must be a torch.distributed.ProcessGroup, got 'gloo': leave it out")
    said = refusal(model, lambda model: attach(model, GOOD, process_group=model.process_group))
    assert said.startswith("process_group must be another group than the model's own, which DDP uses during backward")


def test_a_lane_that_is_none_is_refused() -> None:
    said = refusal(wrapped(), lambda model: micro.attach(model, GOOD, lane="stream"))
    assert said == "lane must be one of auto, thread, caller, got 'stream'"


def test_collectives_of_backward_are_seen() -> None:
    assert not has_collectives(nn.Linear(2, 2), finds_unused=False)
    assert has_collectives(nn.Linear(2, 2), finds_unused=True)
    assert has_collectives(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), finds_unused=False)


def test_parameters_on_several_devices_are_refused() -> None:
    parameters = {"a": torch.zeros(2), "b": torch.zeros(2, device="meta")}
    with pytest.raises(ValueError, match=r"^parameters must be on one device, got cpu, meta: place the model on one"):
        check_parameters(parameters, whole_model=False)


def test_vectors_that_indices_cannot_count_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "MAX_NUMEL", 20)  # the model has parameters of 16, 4, 8 and 2 elements
    model = wrapped()
    said = refusal(model, lambda model: micro.attach(model, GOOD, scope="model"))
    assert said.startswith("scope=model selects in one vector, this model has 30 elements and indices (int32) count 20")
    monkeypatch.setattr(flat, "MAX_NUMEL", 10)
    said = refusal(model, lambda model: micro.attach(model, GOOD))
    assert said.startswith("'0.weight' has 16 elements, indices (int32) count 10: make several parameters of it")
