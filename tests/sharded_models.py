"""Models of fully_shard on a group of one rank, their backwards and gradients, for tests of micro.attach_fsdp."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import micro
from tests.small_models import TwoHeads, batch

REDUCER = micro.SparseReducer(micro.Micro(), density=0.2)
SKIP = micro.SparseReducer(micro.Micro(), density=0.2, nonfinite="skip")

Named = dict[str, Tensor]


def one_rank_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def sharded(model: nn.Module | None = None, **settings: Any) -> nn.Module:
    """Return a model, TwoHeads by default, of which each child is an FSDP module, as the whole is."""
    model = model or TwoHeads()
    for child in model.children():
        fully_shard(child, mesh=one_rank_mesh(), **settings)
    return fully_shard(model, mesh=one_rank_mesh(), **settings)


def attached(
    reducer: micro.Reducer = REDUCER, model: nn.Module | None = None, **settings: Any
) -> tuple[nn.Module, micro.ShardedAttachment]:
    model = sharded(model)
    return model, micro.attach_fsdp(model, reducer, replicas=one_rank_mesh(), **settings)


def backward(model: nn.Module, step: int, *, factor: float = 1.0, **settings: Any) -> None:
    (model(batch(step), **settings).square().sum() * factor).backward()


def gradients(model: nn.Module) -> Named:
    """Return copies of the gradients by name, where there are any."""
    return {
        name: p.grad.to_local().clone()
        for name, p in model.named_parameters()
        if p.grad is not None  # type: ignore[attr-defined]
    }


def given(step: int, **settings: Any) -> Named:
    """Return the gradients of a step of TwoHeads without any reducer."""
    plain = TwoHeads()
    backward(plain, step, **settings)
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def kept(attachment: micro.ShardedAttachment) -> Named:
    """Return copies of the residuals by name."""
    return {
        name: piece.clone()
        for bucket in attachment.state_dict()["buckets"]
        for name, piece in bucket["memory"].get("residual", {}).items()
    }


def total(*parts: Named) -> Named:
    """Return the sum by name."""
    sums: Named = {}
    for part in parts:
        for name, tensor in part.items():
            sums[name] = sums[name] + tensor.view_as(sums[name]) if name in sums else tensor.clone()
    return sums


def assert_same(one: Named, other: Named) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name].view_as(tensor), rtol=1e-5, atol=1e-6)
