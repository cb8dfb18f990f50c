"""Models of fully_shard on a group of one rank, for tests of micro.attach_fsdp."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import micro
from tests.small_models import TwoHeads, wrapped

REDUCER = micro.SparseReducer(micro.Micro(), density=0.2)


def one_rank_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def sharded(model: nn.Module | None = None, **settings: Any) -> nn.Module:
    """Return a model, TwoHeads by default, that is an FSDP module like each of its children."""
    model = TwoHeads() if model is None else model
    for child in model.children():
        fully_shard(child, mesh=one_rank_mesh(), **settings)
    return fully_shard(model, mesh=one_rank_mesh(), **settings)


def attach(model: nn.Module, reducer: micro.Reducer = REDUCER, **settings: Any) -> micro.ShardedAttachment:
    return micro.attach_fsdp(model, reducer, replicas=one_rank_mesh(), **settings)


def attached_by(
    driver: str, reducer: micro.Reducer, model: nn.Module | None = None, **settings: Any
) -> tuple[Any, micro.Attachment | micro.ShardedAttachment]:
    """Return a model with an attachment: of "ddp", which has a bucket for each layer, or of "fsdp"."""
    if driver == "fsdp":
        made = sharded(model)
        return made, attach(made, reducer, **settings)
    ddp = wrapped(model)
    return ddp, micro.attach(ddp, reducer, **settings)


def attached(reducer: micro.Reducer = REDUCER, **settings: Any) -> tuple[nn.Module, micro.ShardedAttachment]:
    model = sharded()
    return model, attach(model, reducer, **settings)
