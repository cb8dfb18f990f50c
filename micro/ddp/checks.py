"""The checks of attach, which all ranks pass or fail together before anything is created or registered."""

from collections.abc import Mapping
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from micro.drivers.lane import LaneChoice
from micro.drivers.settings import check_one_vector
from micro.drivers.wrappers import ddp_models, reduced_parameters
from micro.reducers.base import Reducer
from micro.values import flat
from micro.values.flat import real
from micro.values.names import listed


def check_model(model: DistributedDataParallel) -> None:
    """Raise ValueError if DDP has no buckets, or the module has no parameters or makes sparse gradients."""
    if next(model.module.parameters(), None) is None:
        raise ValueError(
            "model has no parameters any more, as one over DTensors has none after its first forward: attach before it"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ValueError(
            "model was wrapped while torch._dynamo.config.optimize_ddp was 'python_reducer', with which DDP has no "
            "buckets: wrap it with 'ddp_optimizer'"
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise ValueError(
            "mixed_precision of DDP brings a communication hook of its own, and DDP takes one: "
            "wrap the model without it, and use torch.autocast"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise ValueError(
            "model was wrapped with skip_all_reduce_unused_params, with which DDP leaves out buckets: wrap it without"
        )
    for name, inner in model.module.named_modules():
        if isinstance(inner, nn.Embedding | nn.EmbeddingBag) and inner.sparse:
            where = f"'{name}'" if name else f"the model, an {type(inner).__name__},"
            raise ValueError(f"gradients must be dense tensors, {where} makes sparse ones: build it with sparse=False")


def check_one_ddp(model: DistributedDataParallel) -> None:
    """Raise ValueError if another DDP also averages the gradients of ``model``, and overwrites the update."""
    inner = [name for name, part in model.module.named_modules() if isinstance(part, DistributedDataParallel)]
    own = {id(parameter) for parameter in reduced_parameters(model).values()}
    modules = dict(model.module.named_modules())
    if any(id(parameter) in own for name in inner for parameter in modules[name].parameters()):
        raise ValueError(
            f"model holds a DistributedDataParallel inside of another, '{inner[0] or 'module'}', and both average the "
            "gradients: wrap it once"
        )
    if any(outer is not model and model in outer.modules() for outer in ddp_models()):
        raise ValueError(
            "model is inside of another DistributedDataParallel, and both average the gradients: wrap it once"
        )


def check_held(model: DistributedDataParallel) -> None:
    """Raise ValueError if DDP's parameters are not those that the module has, and trains, now."""
    lost = [name for name, parameter in reduced_parameters(model).items() if not _is_held(parameter)]
    if lost:
        raise ValueError(
            f"DDP does not reduce {listed(lost)}: replaced, added, unfrozen or cast after the model was wrapped. Wrap "
            "the model after that"
        )
    present = {id(parameter) for parameter in model.module.parameters()}
    held = [each for each in getattr(model, "_module_parameters", ()) if each.requires_grad and id(each) not in present]
    gone = [tuple(parameter.shape) for parameter in held if _is_held(parameter)]
    if gone:
        raise ValueError(
            f"DDP reduces a parameter of shape {gone[0]} that the model has no more: it was replaced, removed or tied "
            "to another after the model was wrapped. Wrap the model after that"
        )


def _is_held(parameter: Tensor) -> bool:
    """Return whether something, such as DDP's hook, keeps the parameter's gradient accumulation node alive.

    Each access creates a new Python object, but the node's metadata live as long as the node. Autograd creates a new
    node at each call if nothing holds it: after a cast, or for a parameter that DDP does not know.
    """
    with torch.enable_grad():
        node: Any = get_gradient_edge(parameter).node
        node.metadata["micro"] = True
        del node
        again: Any = get_gradient_edge(parameter).node
        return again.metadata.pop("micro", False) is True


def check_parameters(parameters: Mapping[str, Tensor], *, whole_model: bool) -> None:
    """Raise ValueError if devices, sizes or dtypes of the trained ``parameters`` are not supported."""
    if not parameters:
        raise ValueError("model has no parameter that is trained now: unfreeze one before")
    devices = sorted({str(parameter.device) for parameter in parameters.values()})
    if len(devices) > 1:
        raise ValueError(
            f"parameters must be on one device, got {', '.join(devices)}: "
            "place the model on one device, and use one rank per device"
        )
    for name, parameter in parameters.items():
        numel = real(parameter).numel()
        if numel > flat.MAX_NUMEL:
            raise ValueError(
                f"'{name}' has {numel} elements, indices (int32) count {flat.MAX_NUMEL}: "
                "make several parameters of it, or freeze it"
            )
    if whole_model:
        check_one_vector(real(parameter) for parameter in parameters.values())


def chosen_lane(lane: str, model: DistributedDataParallel, reducer: Reducer) -> str:
    """Return "thread" or "caller"; see micro.attach."""
    if lane not in get_args(LaneChoice):
        raise ValueError(f"lane must be one of {', '.join(get_args(LaneChoice))}, got {lane!r}")
    if lane != "auto":
        return lane
    modules = model.module.modules()
    has_collectives = model.find_unused_parameters or any(isinstance(each, nn.SyncBatchNorm) for each in modules)
    if next(model.module.parameters()).device.type == "cuda":
        return "caller" if has_collectives else "thread"
    return "caller" if reducer.is_one_sum and not has_collectives else "thread"


def check_group(group: object, model: DistributedDataParallel, *, lane: str) -> None:
    """Raise ValueError unless ``group`` is None, or a process group with the model's ranks that fits the lane."""
    if group is None:
        return
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"process_group must be a torch.distributed.ProcessGroup, got {group!r}: leave it out to have one made"
        )
    wanted, given = (dist.get_process_group_ranks(g) for g in (model.process_group, group))
    if given != wanted:
        raise ValueError(f"process_group must hold the model's ranks {wanted}, got {given}: make it of the same ranks")
    if group is model.process_group and lane == "thread":
        raise ValueError(
            "process_group must be another group than the model's own, which DDP uses during backward: "
            "leave it out, or reduce in that order too, by lane='caller'"
        )
