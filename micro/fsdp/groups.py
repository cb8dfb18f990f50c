"""FSDP's parameter groups: the parameters whose gradients one call of the all-reduce hook gets, in which order."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from micro.flat import Layout
from micro.wrappers import plain_names

Hook = Callable[[Tensor], None]


class ShardGroup:
    """The parameters that one FSDP module reduces together, as this rank holds them: a shard of each.

    FSDP has no public word for their order in the vector that its hook gets, so that its own objects are read here, and
    nowhere else. A vector of another length than expected is refused (``layout``).

    Args:
        module: an FSDPModule.
        param_group: FSDP's own, of that module.
        names: of all parameters of the model, by their id.
    """

    def __init__(self, module: nn.Module, param_group: Any, names: dict[int, str]) -> None:
        self._module = module
        self._param_group = param_group
        self.names = {id(each): names[id(each.sharded_param)] for each in param_group.fsdp_params}

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that share these parameters, each with a shard; None where they are not sharded."""
        group: dist.ProcessGroup | None = getattr(self._param_group.mesh_info, "shard_process_group", None)
        return group

    @property
    def device(self) -> torch.device:
        """Where gradients are reduced."""
        device: torch.device = self._param_group.device
        return device

    @property
    def has_replicas(self) -> bool:
        """Whether FSDP itself averages over replicas."""
        return getattr(self._param_group.mesh_info, "replicate_mesh_dim", None) is not None

    @property
    def hook(self) -> Hook | None:
        """What FSDP calls with each shard that it has reduced."""
        hook: Hook | None = self._param_group._all_reduce_hook
        return hook

    def set_hook(self, hook: Hook) -> None:
        """Have FSDP call ``hook`` with each shard that it has reduced."""
        self._module.set_all_reduce_hook(hook)  # type: ignore[operator]

    @property
    def reduces_all(self) -> bool:
        """Whether the next gradients are to be averaged over replicas (``set_requires_all_reduce``)."""
        return bool(self._param_group.all_reduce_grads)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters by name, each as a DTensor that holds this rank's shard."""
        return {self.names[id(each)]: each.sharded_param for each in self._param_group.fsdp_params}

    def local(self) -> dict[str, Tensor]:
        """Return this rank's shard of each parameter by name, without padding."""
        return {self.names[id(each)]: each.sharded_param.to_local() for each in self._param_group.fsdp_params}

    def shards(self) -> dict[str, Tensor]:
        """Return a tensor without memory by name, of the shape, dtype and device of each parameter's padded shard."""
        return {
            self.names[id(each)]: each.sharded_param.to_local()
            .new_empty(())
            .expand(each.padded_sharded_param_size)
            .detach()
            for each in self._param_group.fsdp_params
        }

    def layout(self, grad: Tensor) -> Layout:
        """Return where each parameter's shard lies in the vector (numel,) that the hook got.

        Raises:
            ValueError: it holds other elements than those of the trained parameters.
        """
        reduced = [each for each in self._in_order() if each.sharded_param.requires_grad]
        names = tuple(self.names[id(each)] for each in reduced)
        shapes = tuple(tuple(each.padded_sharded_param_size) for each in reduced)
        expected = sum(torch.Size(shape).numel() for shape in shapes)
        if grad.numel() != expected:
            raise ValueError(
                f"shard of '{names[0] if names else ''}' and {len(names) - 1} more holds {grad.numel()} elements, "
                f"expected {expected}: every trained parameter of an FSDP module must be used in every step "
                "(freeze unused ones, or call set_reduce_scatter_unused_params where torch has it)"
            )
        return Layout(names, shapes)

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Yield each trained parameter with this rank's shard of its gradient, None where there is none yet."""
        for parameter in self.parameters().values():
            if parameter.requires_grad:
                grad: Any = parameter.grad
                yield parameter, None if grad is None else grad.to_local()

    def _in_order(self) -> Sequence[Any]:
        """Return FSDP's parameters in the order in which it reduces them, which newer versions sort by dtype."""
        parameters: Sequence[Any] = self._param_group.fsdp_params
        order = getattr(self._param_group, "_reduce_scatter_param_indices", None)
        return parameters if order is None else [parameters[index] for index in order]


def shard_groups(model: nn.Module) -> list[ShardGroup]:
    """Return the parameter groups of all FSDP modules of ``model``.

    Raises:
        ValueError: the model is not one of fully_shard, or a trained parameter is in none of its groups.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # takes a second, and few need it

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "model is wrapped in FullyShardedDataParallel (FSDP1), which has no hook for shards: shard it with "
            "torch.distributed.fsdp.fully_shard"
        )
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(
            f"model must be sharded by torch.distributed.fsdp.fully_shard, got {type(model).__name__}: "
            "for a DistributedDataParallel use micro.attach"
        )
    plain = plain_names(name for name, _ in model.named_parameters())
    names = {id(parameter): plain[name] for name, parameter in model.named_parameters()}
    groups = [ShardGroup(module, group, names) for module in modules for group in _param_groups(module)]
    sharded = {id(parameter) for group in groups for parameter in group.parameters().values()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in sharded:
            raise ValueError(f"parameter '{name}' is not sharded: call fully_shard on the whole model as well")
        if parameter.is_complex():
            raise ValueError(f"parameter '{name}' is complex, which attach_fsdp does not reduce: use micro.attach")
    return groups


def _param_groups(module: nn.Module) -> list[Any]:
    state = module._get_fsdp_state()  # type: ignore[operator]
    if hasattr(state, "_fsdp_param_groups"):
        groups = list(state._fsdp_param_groups)
    else:  # older torch
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    if len(groups) > 1:
        raise ValueError(
            "an FSDP module has parameters on several meshes, for which FSDP has no all-reduce hook: "
            "give fully_shard one mesh"
        )
    return groups
