"""The life of an attachment, on a group of one rank: attach, close, attach again; copies of the model."""

import copy
import gc
import io
import os
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import micro
from micro.private_comm import NAMES_ARE_COUNTED, PrivateComm, _copied
from tests.small_models import flat_gradient

TIMEOUT = timedelta(seconds=77)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    yield
    dist.destroy_process_group()


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), bucket_cap_mb=1e-5)


def reducer() -> micro.SparseReducer:
    return micro.SparseReducer(micro.TopK(), density=0.2)


def gradient(model: nn.Module, step: int = 0) -> Tensor:
    model.zero_grad()
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()
    return flat_gradient(model)


def is_sparse(vector: Tensor) -> bool:
    return int((vector != 0).sum()) < vector.numel()


def open_things() -> tuple[int, int]:
    """Return how many threads this process has, torch's own among them, and how many files."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_a_closed_attachment_leaves_a_model_that_trains_as_plain_ddp() -> None:
    model = wrapped()
    attachment = micro.attach(model, reducer())
    assert is_sparse(gradient(model))
    attachment.close()
    assert torch.equal(gradient(model), gradient(wrapped()))
    assert attachment.stats, "what was measured can still be read"
    attachment.close()


def test_a_model_is_attached_again_and_goes_on_from_the_saved_state() -> None:
    model, uninterrupted = wrapped(), wrapped()
    micro.attach(uninterrupted, reducer())
    with micro.attach(model, reducer()) as first:
        for step in range(3):
            assert torch.equal(gradient(model, step), gradient(uninterrupted, step))
        saved = first.state_dict()
    second = micro.attach(model, reducer())
    second.load_state_dict(saved)
    for step in range(3, 5):
        assert torch.equal(gradient(model, step), gradient(uninterrupted, step))


def test_detach_closes_what_is_attached() -> None:
    model = wrapped()
    with pytest.raises(ValueError, match="model has no attachment"):
        micro.detach(model)
    micro.attach(model, reducer())
    micro.detach(model)
    assert torch.equal(gradient(model), gradient(wrapped()))
    with pytest.raises(ValueError, match="model has no attachment"):
        micro.detach(model)


def test_a_model_that_is_attached_or_hooked_is_refused() -> None:
    model, hooked = wrapped(), wrapped()
    micro.attach(model, reducer())
    with pytest.raises(ValueError, match="model has an attachment: close that one first"):
        micro.attach(model, reducer())
    hooked.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match="model already has a communication hook, and DDP takes one: wrap it again"):
        micro.attach(hooked, reducer())


def test_ten_attachments_leave_no_thread_and_no_file() -> None:
    model = wrapped()
    others = set(threading.enumerate())  # of models that earlier tests left to the garbage collector
    counts = []
    for step in range(10):
        with micro.attach(model, reducer()):
            gradient(model, step)
        counts.append(open_things())
    first, last = counts[0], counts[-1]  # fewer, where something that an earlier test left behind has ended
    assert all(after <= before for before, after in zip(first, last, strict=True)), counts
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name == "micro-lane"]


@pytest.mark.skipif(torch.__version__ < NAMES_ARE_COUNTED, reason="such groups stay open in this torch")
def test_models_that_are_deleted_without_close_leave_the_group_of_the_last_alone() -> None:
    counts = []
    for step in range(4):
        model = wrapped()
        micro.attach(model, reducer())
        gradient(model, step)
        del model
        gc.collect()
        counts.append(open_things())
    grown = [after - before for before, after in zip(counts[0], counts[-1], strict=True)]
    assert max(grown) < len(counts) - 1, counts  # torch may start a thread once, but nothing stays of each model


def test_the_group_of_an_attachment_has_the_timeout_of_the_models_group() -> None:
    attachment = micro.attach(wrapped(), reducer())
    assert attachment.comm.group is not None
    assert attachment.comm.group._get_backend(CPU).options._timeout == TIMEOUT


def test_a_group_with_a_backend_for_each_device_serves() -> None:
    group = dist.new_group([0], backend="cpu:gloo,cuda:gloo")
    comm = PrivateComm(group, CPU)
    assert dist.get_backend(comm.group) == "gloo"
    comm.close()


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch that was built with NCCL")
def test_the_options_of_nccl_are_copied() -> None:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = TIMEOUT
    options.config.max_ctas = 3
    copied = _copied(options)
    assert isinstance(copied, dist.ProcessGroupNCCL.Options)
    assert copied is not options
    assert (copied.is_high_priority_stream, copied._timeout, copied.config.max_ctas) == (True, TIMEOUT, 3)


def test_a_group_of_the_users_own_is_used_and_left() -> None:
    group = dist.new_group([0])
    with micro.attach(wrapped(), reducer(), process_group=group) as attachment:
        assert attachment.comm.group is group
    assert dist.get_world_size(group) == 1
    with pytest.raises(RuntimeError, match="the process group was given up"):
        _ = attachment.comm.group


def saved_and_loaded(model: DistributedDataParallel) -> DistributedDataParallel:
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    assert isinstance(loaded, DistributedDataParallel)
    return loaded


def averaged(model: DistributedDataParallel) -> DistributedDataParallel:
    inner = AveragedModel(model).module
    assert isinstance(inner, DistributedDataParallel)
    return inner


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded, averaged])
def test_a_copy_of_an_attached_model_is_plain_ddp_and_can_be_attached(copied: object) -> None:
    model = wrapped()
    micro.attach(model, reducer())
    gradient(model)
    assert callable(copied)
    twin = copied(model)
    assert torch.equal(gradient(twin), gradient(wrapped()))
    with micro.attach(twin, reducer()):
        assert is_sparse(gradient(twin))
    assert is_sparse(gradient(model, 1)), "the model lost its attachment"


def test_a_copy_of_an_attachment_says_that_it_is_attached_to_no_model() -> None:
    attachment = micro.attach(wrapped(), reducer())
    with pytest.raises(AttributeError, match="no 'stats': a copy of an attachment is attached to no model"):
        _ = copy.deepcopy(attachment).stats
