"""Check the arguments of LocalSteps before the first step."""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from micro.comm.group import GroupComm
from micro.comm.ranks import Comm
from micro.drivers.meeting import Entry, meeting
from micro.drivers.wrappers import plain_parameters
from micro.local.buffers import BufferPolicy
from micro.reducers.base import Reducer, check_reducer
from micro.reducers.quantized import Quantized
from micro.reducers.sparse import SparseReducer
from micro.reducers.wrapping import innermost
from micro.values.flat import MAX_NUMEL, real

IN_USE: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
"""Optimizers that a LocalSteps is attached to."""


def ranks_of(replicas: Any, comm: Comm | None) -> Comm | dist.ProcessGroup | None:
    """Return the ranks that exchange: ``comm``, or the process group ``replicas``; None: all ranks.

    Raises:
        ValueError: both are given, replicas is not a process group, or there are no ranks.
    """
    if comm is not None and replicas is not None:
        raise ValueError("replicas and comm both set the ranks: give only one of them")
    if comm is None and not dist.is_initialized():
        raise ValueError(
            "local steps need ranks to exchange with: call torch.distributed.init_process_group first, or give comm"
        )
    if replicas is not None and not isinstance(replicas, dist.ProcessGroup):
        raise ValueError(f"replicas must be a torch.distributed.ProcessGroup, got {type(replicas).__name__}")
    return replicas if comm is None else comm


def check_apart(model: object, ranks: Comm | dist.ProcessGroup | None) -> None:
    """Raise ValueError if DDP already averages gradients with a rank that also exchanges rounds with this one."""
    if isinstance(ranks, Comm):
        return
    meeting = set(dist.get_process_group_ranks(ranks))
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, DistributedDataParallel):
            others = meeting & set(dist.get_process_group_ranks(module.process_group)) - {dist.get_rank()}
            if others:
                raise ValueError(
                    f"model averages gradients with rank {min(others)} in each step, by DistributedDataParallel: give "
                    "it without, or with process_group= the ranks of a replica and replicas= this rank's peers"
                )


def ranks_of_replica(model: object, comm: Comm | None) -> AbstractContextManager[Entry]:
    """Return a meeting of the ranks between which DDP averages each step: their rounds must end in the same step."""
    modules = model.modules() if isinstance(model, nn.Module) and comm is None else ()
    groups = [each.process_group for each in modules if isinstance(each, DistributedDataParallel)]
    shared = [group for group in groups if dist.get_world_size(group) > 1]
    return meeting("micro.LocalSteps", lambda: shared[0]) if shared else nullcontext(Entry())


def pace(every: int | Sequence[int], ranks: Comm | dist.ProcessGroup | None) -> tuple[int, float]:
    """Return this rank's number of steps per round, and the weight of its difference in the mean over ranks.

    Raises:
        ValueError: every is neither a number of steps nor one per rank.
    """
    numbers: list[Any] = list(every) if isinstance(every, list | tuple) else [every]
    if any(not isinstance(each, int) or isinstance(each, bool) or each < 1 for each in numbers):
        raise ValueError(f"every must be a number of steps, at least 1, or one for each rank, got {every!r}")
    if numbers == [every]:
        return numbers[0], 1.0
    comm = ranks if isinstance(ranks, Comm) else GroupComm(ranks)
    if len(numbers) != comm.world_size:
        raise ValueError(f"every must be a number of steps, or one for each of {comm.world_size} ranks, got {every!r}")
    return numbers[comm.rank], numbers[comm.rank] * comm.world_size / sum(numbers)


def check_settings(buffers: str, on_round: object) -> None:
    """Raise ValueError for a value out of its range."""
    if buffers not in get_args(BufferPolicy):
        raise ValueError(f"buffers must be one of {', '.join(get_args(BufferPolicy))}, got '{buffers}'")
    if on_round is not None and not callable(on_round):
        raise ValueError(f"on_round must be callable, got {type(on_round).__name__}: give a function of one RoundStats")


def as_optimizers(given: Any) -> list[Optimizer]:
    """Return the inner optimizers, unwrapped from their frameworks, from one or several.

    Raises:
        ValueError: one is not an optimizer, is used by other local steps, communicates itself, or runs no hooks.
    """
    optimizers = [_unwrapped(each) for each in (given if isinstance(given, list | tuple) else [given])]
    for each in optimizers or [None]:
        if not isinstance(each, Optimizer):
            raise ValueError(f"optimizer must be a torch.optim.Optimizer, or several, got {type(each).__name__}")
        if each in IN_USE:
            raise ValueError("optimizer is used by other local steps: call their close() first")
        if type(each).__module__.startswith("torch.distributed.optim"):
            raise ValueError(
                f"optimizer {type(each).__name__} exchanges in each step, unlike local steps: use one of torch.optim"
            )
        if not _runs_hooks(each):
            raise ValueError(
                f"optimizer {type(each).__name__} runs no hooks in step(), by which steps are counted: its class must "
                "call Optimizer.__init__, and its step not be replaced"
            )
    return optimizers


class _Reached(Exception):
    """A hook was run."""


def _runs_hooks(optimizer: Optimizer) -> bool:
    """Return whether ``step()`` runs the optimizer's hooks; False only if a call ended without running them.

    If torch has not marked ``step``, for instance because a wrapper replaced it, it is called without gradients; a hook
    leaves it before it does anything.
    """
    if getattr(optimizer.step, "hooked", False):
        return True
    if "_optimizer_step_pre_hooks" not in vars(optimizer):  # Optimizer.__init__ was not called
        return False

    def leave(*_: object) -> None:
        raise _Reached

    held = {p: p.grad for group in optimizer.param_groups for p in group["params"]}
    handle = optimizer.register_step_pre_hook(leave)
    for parameter in held:
        parameter.grad = None
    try:
        optimizer.step()
    except Exception:  # _Reached, or an error that means nothing, as there is no closure
        return True
    finally:
        handle.remove()
        for parameter, grad in held.items():
            parameter.grad = grad
    return False


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper of Accelerate or Lightning, whose own step may do nothing."""
    is_wrapper = type(optimizer).__module__.partition(".")[0] in ("accelerate", "lightning")
    return optimizer.optimizer if is_wrapper else optimizer


def trained_parameters(model: object, optimizers: Sequence[Optimizer], own: Collection[Tensor]) -> dict[str, Tensor]:
    """Return the trained and exchanged parameters, by their names without wrappers.

    Args:
        own: parameters that are not exchanged.

    Raises:
        ValueError: the model is not a module or has nothing to train; a parameter is in no optimizer; an optimizer has
            other parameters; parameters are on several devices, sharded, or too many.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    kept = {id(parameter) for parameter in own}
    trained = {name: p for name, p in plain_parameters(model).items() if is_trained(p) and id(p) not in kept}
    if not trained:
        raise ValueError("model has no parameter to train: nothing would be exchanged")
    _check_held(model, trained, [*parameters_of(optimizers)], kept)
    sharded = next((name for name, parameter in trained.items() if hasattr(parameter, "to_local")), None)
    if sharded is not None:
        raise ValueError(f"parameters must be whole on each rank, '{sharded}' is sharded: use a model without FSDP")
    devices = sorted({str(parameter.device) for parameter in trained.values()})
    if len(devices) > 1:
        raise ValueError(f"parameters must be on one device, got {', '.join(devices)}: use one rank per device")
    numel = sum(real(parameter.detach()).numel() for parameter in trained.values())
    if numel > MAX_NUMEL:
        raise ValueError(f"the model has {numel} elements, indices (int32) count {MAX_NUMEL}: freeze some of them")
    return trained


def _check_held(
    model: nn.Module, trained: Mapping[str, Tensor], held: Sequence[Tensor], kept: AbstractSet[int]
) -> None:
    """Raise ValueError unless the optimizers hold all ``trained`` parameters, and no others except ``kept``."""
    ids = {id(parameter) for parameter in held}
    missing = [name for name, parameter in trained.items() if id(parameter) not in ids]
    if len(missing) == len(trained):
        raise ValueError("optimizer holds no parameter of the model: make it of model.parameters()")
    if missing:
        raise ValueError(
            f"optimizer must hold all trained parameters, '{missing[0]}' is not in it: add it, freeze it, or give all "
            "optimizers in a list, in the order in which they step"
        )
    inside = kept | {id(parameter) for parameter in model.parameters()}
    outside = next((p for p in held if is_trained(p) and id(p) not in inside), None)
    if outside is not None:
        raise ValueError(f"optimizer holds {described(outside)} outside of the model: {OUTSIDE}")


OUTSIDE = (
    "give a torch.nn.ModuleList of all trained modules in place of the model, or list in own= the parameters that are "
    "not exchanged"
)


def described(parameter: Tensor) -> str:
    """Return a description of a parameter without a name."""
    return f"a parameter of shape {tuple(parameter.shape)}"


def is_trained(parameter: Tensor) -> bool:
    """Return whether a parameter requires a gradient and has elements."""
    return parameter.requires_grad and parameter.numel() > 0


def parameters_of(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Yield the optimizers' parameters."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def as_own(given: object) -> list[Tensor]:
    """Return the parameters that are not exchanged. Raises ValueError for anything but parameters."""
    own = list[Tensor]()
    for each in given if isinstance(given, Iterable) and not isinstance(given, Tensor | str) else [given]:
        if not isinstance(each, Tensor):
            raise ValueError(f"own must be parameters, such as head.parameters(), got {type(each).__name__}")
        own.append(each)
    return own


def check_method(reducer: object) -> Reducer:
    """Return the reducer. Raises ValueError if it is not one, or needs the gradient of each step."""
    checked = check_reducer(reducer)
    inner = innermost(checked)
    if isinstance(inner, SparseReducer | Quantized) and inner.feedback.name == "momentum":
        raise ValueError(
            "feedback momentum needs the gradient of each step, local steps exchange differences of weights: use "
            "feedback residual, and the momentum of the inner optimizer"
        )
    return checked
