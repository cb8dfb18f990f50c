"""micro.attach_fsdp on a group of one rank, in the process of the test: what holds and is refused without any peer."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import micro
from tests.small_models import TwoHeads, batch

REDUCER = micro.SparseReducer(micro.Micro(), density=0.2)


@pytest.fixture(autouse=True)
def mesh(one_rank: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = TwoHeads()
    fully_shard(model.body, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model: nn.Module, number: int, *, both: bool = True) -> float:
    """Run a backward of a batch; return the sum of the model's gradients."""
    model.zero_grad()
    model(batch(number), both=both).square().mean().backward()
    return sum(float(p.grad.to_local().double().sum()) for p in model.parameters() if p.grad is not None)


def refusal(model: nn.Module, reducer: object = REDUCER, **settings: object) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        micro.attach_fsdp(model, reducer, **{"replicas": dist.group.WORLD} | settings)  # type: ignore[arg-type]
    words = str(caught.value)
    assert "\n" not in words
    return words


@pytest.mark.parametrize("scope", ["bucket", "tensor"])
def test_nothing_of_the_gradient_is_lost(mesh: DeviceMesh, scope: str) -> None:
    model, plain = sharded(mesh), TwoHeads()
    attachment = micro.attach_fsdp(model, REDUCER, replicas=mesh, scope=scope)
    left = 0.0
    for number in range(4):
        left += step(plain_on(mesh, plain), number) - step(model, number)
    waiting = torch.cat(attachment.residuals()).double().sum()
    assert float(waiting) == pytest.approx(left, rel=1e-4, abs=1e-6)
    assert sum(stats.global_count for stats in attachment.stats) < sum(stats.numel for stats in attachment.stats)


def plain_on(mesh: DeviceMesh, plain: nn.Module) -> nn.Module:
    """Return a sharded copy with the weights of ``plain``, without a reducer."""
    copy = TwoHeads()
    copy.load_state_dict(plain.state_dict())
    return fully_shard(copy, mesh=mesh)


def test_a_model_that_is_not_of_fully_shard_is_refused(mesh: DeviceMesh) -> None:
    assert "must be sharded by torch.distributed.fsdp.fully_shard, got TwoHeads" in refusal(TwoHeads())
    assert "use micro.attach" in refusal(DistributedDataParallel(TwoHeads()))
    assert "FSDP1" in refusal(FullyShardedDataParallel(TwoHeads(), device_id=torch.device("cpu")))


def test_a_parameter_outside_of_all_fsdp_modules_is_refused() -> None:
    model = TwoHeads()
    fully_shard(model.body)
    assert "parameter 'first.weight' is not sharded" in refusal(model)


def test_a_second_attachment_on_one_model_is_refused(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    with micro.attach_fsdp(model, REDUCER, replicas=mesh) as attachment:
        assert "already has an all-reduce hook" in refusal(model)
    attachment.close()  # a second time


def test_what_reduces_nothing_is_refused(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    assert "got the selector Micro: wrap it" in refusal(model, micro.Micro())
    assert "scope must be one of" in refusal(model, scope="layer")


def test_a_state_of_other_shapes_is_refused(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    attachment = micro.attach_fsdp(model, REDUCER, replicas=mesh)
    step(model, 0)
    saved = attachment.state_dict()
    saved["buckets"][0]["shapes"] = dict.fromkeys(saved["buckets"][0]["shapes"], (3, 1))
    with pytest.raises(ValueError, match="of shape"):
        attachment.load_state_dict(saved)
