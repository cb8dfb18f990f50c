"""Access FSDP's parameter groups; the only file that reads FSDP's internal objects."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from micro.drivers.wrappers import plain_names
from micro.fsdp.vectors import own

Hook = Callable[[Tensor], None]
_BACKWARD_END = "_root_post_backward_final_callback"  # method of FSDP's state that autograd calls after a backward


class ShardGroup:
    """The parameters that one FSDP module reduces together, of which this rank holds a shard each.

    Args:
        param_group: FSDP's object for the module.
        names: of all parameters of the model, by id.

    Attributes:
        module: an FSDPModule.
        process_group: the ranks that share these parameters, each with a shard; None if they are not sharded.
        device: where gradients are reduced.
        waiting_dtype: dtype of gradients in ``parameter.grad`` that FSDP has reduced and the replicas have not yet
            averaged; None if there are none.
    """

    def __init__(self, module: nn.Module, param_group: Any, names: dict[int, str]) -> None:
        self.module: Any = module
        self.param_group = param_group
        self._names = {id(each): names[id(each.sharded_param)] for each in param_group.fsdp_params}
        self.process_group: dist.ProcessGroup | None = getattr(param_group.mesh_info, "shard_process_group", None)
        self.device: torch.device = param_group.device
        self.waiting_dtype: torch.dtype | None = None

    @property
    def hook(self) -> Hook | None:
        """The hook that FSDP calls with each reduced shard."""
        hook: Hook | None = self.param_group._all_reduce_hook
        return hook

    def set_hook(self, hook: Hook) -> None:
        """Make FSDP call ``hook`` with each reduced shard, before adding it to ``parameter.grad``."""
        self.module.set_all_reduce_hook(hook)

    def check_reduce_scatter(self) -> None:
        """Raise ValueError if FSDP's reduce-scatter cannot be replaced, or was replaced already."""
        if not hasattr(self.module, "set_custom_reduce_scatter"):
            raise ValueError(f"torch {torch.__version__} lacks FSDPModule.set_custom_reduce_scatter: use 2.15")
        present = type(self.param_group._reduce_scatter_comm).__name__
        if present != "DefaultReduceScatter":
            raise ValueError(f"model has another reduce-scatter than FSDP's already, {present}: close or remove it")

    def set_reduce_scatter(self, reduce_scatter: Any) -> Any:
        """Make FSDP use ``reduce_scatter`` (torch's ReduceScatter); return the previous one."""
        before = self.param_group._reduce_scatter_comm
        self.module.set_custom_reduce_scatter(reduce_scatter)
        return before

    @property
    def is_exchanged(self) -> bool:
        """Whether this backward's gradients go to the replicas; see set_requires_gradient_sync and _all_reduce."""
        return bool(self.param_group.reduce_grads and self.param_group.all_reduce_grads)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters by name, as DTensors with this rank's shard."""
        return {self._names[id(each)]: each.sharded_param for each in self.param_group.fsdp_params}

    def local(self) -> dict[str, Tensor]:
        """Return this rank's shard of each parameter by name."""
        return {name: own(parameter) for name, parameter in self.parameters().items()}

    def shards(self) -> dict[str, Tensor]:
        """Return by name a tensor without memory, with the shape, dtype and device of each parameter's shard."""
        return {name: shard.new_empty(()).expand(shard.shape) for name, shard in self.local().items()}

    def check(self) -> None:
        """Raise ValueError if a parameter would be used before the replicas average its gradient."""
        for name, parameter in self.parameters().items():
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"parameter '{name}' has a post-accumulate-grad hook, which would run before the replicas exchange "
                    "its gradient: step the optimizer after backward"
                )

    def drop_waiting(self) -> None:
        """Remove gradients that the replicas have not averaged yet."""
        if self.waiting_dtype is not None:
            self.waiting_dtype = None
            for parameter in self.parameters().values():
                parameter.grad = None


def shard_groups(model: nn.Module) -> list[ShardGroup]:
    """Return the parameter groups of all FSDP modules of ``model``.

    Raises:
        ValueError: the model is not sharded by fully_shard, or a trained parameter is in no group or of an unsupported
            kind.
    """
    modules = _fsdp_modules(model)
    plain = plain_names(name for name, _ in model.named_parameters())
    names = {id(parameter): plain[name] for name, parameter in model.named_parameters()}
    found = {id(group): (module, group) for module in modules for group in _param_groups(module)}
    groups = [ShardGroup(module, group, names) for module, group in found.values()]  # modules may share a group
    sharded = {id(parameter) for group in groups for parameter in group.parameters().values()}
    within = {id(parameter) for module in modules for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in sharded:
            remedy = (
                "fully_shard left it out (ignored_params), or it was added later, so its gradient is never "
                "averaged: shard it, or freeze it by requires_grad_(False)"
                if id(parameter) in within
                else "call fully_shard on the whole model as well"
            )
            raise ValueError(f"parameter '{name}' is not sharded: {remedy}")
        if parameter.is_complex():
            raise ValueError(f"parameter '{name}' is complex, which micro.fsdp does not reduce: use micro.attach")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model has no trained parameter: there is nothing to reduce")
    if any(each.offload_to_cpu for group in groups for each in group.param_group.fsdp_params):
        raise ValueError(
            "model keeps its shards in the host's memory (CPUOffloadPolicy), and gradients are exchanged on the "
            "device: leave out offload_policy"
        )
    return groups


def replica_group(replicas: dist.ProcessGroup | DeviceMesh | None, groups: Sequence[ShardGroup]) -> dist.ProcessGroup:
    """Return the process group of all ranks that hold the same shard as this one.

    Raises:
        ValueError: none is given, its ranks do not hold the same shard, or FSDP itself averages over replicas.
    """
    first = _check_one_mesh(groups)
    if replicas is None:
        raise ValueError(
            "model has no replicas: its gradients are reduced shard by shard, and nothing is left to exchange. "
            "Shard it within each node, fully_shard(model, mesh=mesh['local']), and give replicas=mesh['node']"
        )
    if isinstance(replicas, DeviceMesh):
        if replicas.ndim != 1:
            raise ValueError(f"replicas must be a mesh of one dimension, got {replicas.ndim}: give mesh['node']")
        replicas = replicas.get_group()
    given, own_rank = ranks_of(replicas), dist.get_rank()
    if set(given) & set(first) != {own_rank}:
        raise ValueError(
            f"replicas must be the ranks that hold the same shard as rank {own_rank}, got {given}, "
            f"and the model is sharded over {list(first)}"
        )
    return replicas


def _check_one_mesh(groups: Sequence[ShardGroup]) -> tuple[int, ...]:
    """Return the ranks over which all parameters are sharded.

    Raises:
        ValueError: parameters are sharded over different ranks, or over a mesh of several dimensions.
    """
    if any(getattr(group.param_group.mesh_info, "replicate_mesh_dim", None) is not None for group in groups):
        raise ValueError(
            "model is sharded over a mesh with replicas, which FSDP averages densely by itself: shard it over the "
            "ranks of a node alone, fully_shard(model, mesh=mesh['local']), and give attach_fsdp replicas=mesh['node']"
        )
    meshes: list[Any] = [each.sharded_param.device_mesh for group in groups for each in group.param_group.fsdp_params]
    num_dims = max((mesh.ndim for mesh in meshes), default=1)
    if num_dims > 1:
        raise ValueError(
            f"model is sharded over a mesh of {num_dims} dimensions, attach_fsdp takes one, that of fully_shard: "
            "leave out tensor parallelism"
        )
    first, *others = {tuple(ranks_of(group.process_group)) for group in groups}
    if others:
        raise ValueError(f"parameters are sharded over different ranks, {[first, *others]}: give fully_shard one mesh")
    return first


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of a group; for None, only this one."""
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def call_after_backward(model: nn.Module, call: Callable[[], None]) -> Callable[[], None]:
    """Run ``call`` each time FSDP has finished a backward of ``model``; return a function that stops this.

    FSDP finishes in an autograd callback, once for all modules that share a forward; all gradients are then reduced
    within the node. Backwards that only recompute activations do not count. There is no public hook for this, so the
    callback is replaced.
    """
    states = {id(state): state for state in map(_state_of, _fsdp_modules(model))}
    for state in states.values():
        setattr(state, _BACKWARD_END, _both(getattr(state, _BACKWARD_END), call))

    def stop() -> None:
        for state in states.values():
            vars(state).pop(_BACKWARD_END, None)

    return stop


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call


def _fsdp_modules(model: nn.Module) -> list[nn.Module]:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # slow to import, rarely needed

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "model is wrapped in FullyShardedDataParallel (FSDP1), which has no hook for shards: shard it with "
            "torch.distributed.fsdp.fully_shard"
        )
    modules: list[nn.Module] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(
            f"model must be sharded by torch.distributed.fsdp.fully_shard, got {type(model).__name__}: "
            "for a DistributedDataParallel use micro.attach"
        )
    if not all(
        hasattr(module, "set_all_reduce_hook") and hasattr(_state_of(module), _BACKWARD_END) for module in modules
    ):
        raise ValueError(
            f"torch {torch.__version__} has another FSDP than attach_fsdp knows: use one from 2.11 to 2.15"
        )
    return modules


def _state_of(module: nn.Module) -> Any:
    return module._get_fsdp_state()  # type: ignore[operator]


def _param_groups(module: nn.Module) -> Sequence[Any]:
    state = _state_of(module)
    if hasattr(state, "_fsdp_param_groups"):
        groups = list(state._fsdp_param_groups)
    else:  # older torch
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    if len(groups) > 1:
        raise ValueError(
            "an FSDP module has parameters on several meshes, for which FSDP has no hook: give fully_shard one mesh"
        )
    return groups
