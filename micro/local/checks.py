"""What local steps refuse before the first step."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from micro.flat import MAX_NUMEL, real
from micro.local.buffers import check_policy
from micro.local.outer import has_momentum, rates
from micro.reducers.base import BucketState, Reducer
from micro.reducers.checks import check_reducer
from micro.reducers.sparse import SparseReducer
from micro.reducers.wrapping import innermost
from micro.wrappers import plain_parameters


def check_settings(every: int, buffers: str, on_round: object) -> None:
    """Raise ValueError for a value out of its range."""
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"every must be a number of steps, at least 1, got {every!r}")
    check_policy(buffers)
    if on_round is not None and not isinstance(on_round, Callable):  # type: ignore[arg-type]
        raise ValueError(f"on_round must be callable, got {type(on_round).__name__}: give a function of one RoundStats")


def as_optimizers(given: Any) -> list[Optimizer]:
    """Return the inner optimizers, of which one or several are given.

    Raises:
        ValueError: one is none, is driven by other local steps, or sends messages of its own.
    """
    optimizers = [given] if isinstance(given, Optimizer) else list(given) if isinstance(given, list | tuple) else []
    for each in optimizers or [given]:
        if not isinstance(each, Optimizer):
            raise ValueError(f"optimizer must be a torch.optim.Optimizer, or several, got {type(each).__name__}")
        if each in IN_USE:
            raise ValueError("optimizer drives other local steps already: close those first, by close()")
        if type(each).__module__.startswith("torch.distributed.optim"):
            raise ValueError(
                f"optimizer {type(each).__name__} exchanges in each step, which local steps do without: use one of "
                "torch.optim"
            )
    return optimizers


IN_USE: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
"""Optimizers whose steps are counted as local ones."""


def trained_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return the parameters that are trained, by their names without wrappers.

    Raises:
        ValueError: the model is none or has nothing to train, no optimizer holds one of them, or they are on several
            devices, sharded, or too many.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    trained = {name: p for name, p in plain_parameters(model).items() if p.requires_grad}
    if not trained:
        raise ValueError("model has no parameter to train: nothing would be exchanged")
    _check_optimizers(trained, optimizers)
    _check_tensors(trained)
    return trained


def _check_optimizers(trained: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> None:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    missing = [name for name, parameter in trained.items() if id(parameter) not in held]
    if missing:
        raise ValueError(
            f"optimizer must hold all trained parameters, '{missing[0]}' is not in it: add it, freeze it, or give all "
            "optimizers in a list, in the order in which they step"
            if len(missing) < len(trained)
            else "optimizer holds no parameter of the model: make it of model.parameters()"
        )


def _check_tensors(trained: Mapping[str, Tensor]) -> None:
    sharded = next((name for name, parameter in trained.items() if hasattr(parameter, "to_local")), None)
    if sharded is not None:
        raise ValueError(f"parameters must be whole on each rank, '{sharded}' is sharded: use a model without FSDP")
    devices = sorted({str(parameter.device) for parameter in trained.values()})
    if len(devices) > 1:
        raise ValueError(f"parameters must be on one device, got {', '.join(devices)}: use one rank per device")
    numel = sum(real(parameter.detach()).numel() for parameter in trained.values())
    if numel > MAX_NUMEL:
        raise ValueError(f"the model has {numel} elements, indices (int32) count {MAX_NUMEL}: freeze some of them")


def check_method(reducer: object) -> Reducer:
    """Return the reducer. Raises ValueError where it is none, or needs the gradient of each step."""
    checked = check_reducer(reducer)
    inner = innermost(checked)
    if isinstance(inner, SparseReducer) and inner.feedback.name == "momentum":
        raise ValueError(
            "feedback momentum needs the gradient of each step, local steps exchange differences of weights: use "
            "feedback residual, and the momentum of the inner optimizer"
        )
    return checked


def check_outer(outer: Optimizer, state: BucketState, *, allows_both: bool) -> None:
    """Raise ValueError for an outer optimizer that moves nothing, or that adds up what waits in residuals twice."""
    if not isinstance(outer, Optimizer):
        raise ValueError(f"outer must make a torch.optim.Optimizer, got {type(outer).__name__}: use micro.Outer")
    if any(rate == 0 for rate in rates(outer)):
        raise ValueError("lr of the outer optimizer must not be 0: no weight would move")
    if has_momentum(outer) and state.residual.numel() and not allows_both:
        raise ValueError(
            "outer momentum and a residual both add up what was not applied at once, so that it counts twice: use "
            "momentum=0 of the outer optimizer, feedback none, or say momentum_with_feedback=True"
        )


def check_frozen(frozen: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError where a parameter that was frozen when local steps began has a gradient now."""
    for name, parameter in frozen.items():
        if parameter.grad is not None:
            raise RuntimeError(
                f"'{name}' was frozen when the local steps were made and is trained now, so that nobody would exchange "
                "it: close them, and make new ones with it"
            )


def check_unchanged(
    parameters: Mapping[str, Tensor], device: torch.device, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise RuntimeError where the model was changed since it was given: moved, or parameters of other shapes."""
    for name, parameter in parameters.items():
        own = real(parameter.detach())
        if own.device != device or tuple(own.shape) != shapes[name]:
            raise RuntimeError(
                f"'{name}' was changed in the middle of a round, from {shapes[name]} on {device} to {tuple(own.shape)} "
                f"on {own.device}: close the local steps first, and make new ones"
            )
