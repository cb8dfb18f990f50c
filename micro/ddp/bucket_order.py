"""Restore DDP's bucket order after a restart, from the first step on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def replay(model: DistributedDataParallel, reduced: Mapping[str, Tensor], buckets: Sequence[Sequence[str]]) -> bool:
    """Let gradients of zero arrive in the order of these buckets, by a backward that computes nothing.

    DDP notes the order of its first backward and makes new buckets of it before the second forward. So the buckets of
    a run that goes on are those that it would have had without the interruption, from the first step on. The caller
    sees to it that nothing is reduced meanwhile. Gradients are as before. This rank talks to no other.

    Args:
        reduced: the parameters that DDP reduces, by name.
        buckets: the names in each bucket. What is in none comes last.

    Returns:
        whether it was done: not where DDP keeps its first buckets (unused parameters, static graph) or has mixed
        precision, nor where a parameter has hooks of the user's, which would run.
    """
    saved = [name for names in buckets for name in names if name in reduced]
    order = [reduced[name] for name in dict.fromkeys([*saved, *reduced])]
    if (
        model.find_unused_parameters
        or model.static_graph
        or model.mixed_precision
        or any(_has_hooks(parameter) for parameter in order)
    ):
        return False
    before = [parameter.grad for parameter in order]
    module, syncs = model.module, model.require_forward_param_sync
    model.module, model.require_forward_param_sync = _Zero(order), False
    try:
        for parameter in order:
            parameter.grad = None
        with torch.enable_grad():
            DistributedDataParallel.forward(model).backward()
    finally:
        model.module, model.require_forward_param_sync = module, syncs
        for parameter, gradient in zip(order, before, strict=True):
            parameter.grad = gradient
    return True


class _Zero(nn.Module):
    """A stand-in for the model, whose output depends on the parameters with gradients of zero."""

    def __init__(self, order: Sequence[Tensor]) -> None:
        super().__init__()
        self._order: Callable[[], Sequence[Tensor]] = lambda: order  # behind a call: they must not be registered here

    def forward(self, *_: Any) -> Tensor:
        """Return zero. The term that is added last is the first whose gradient backward computes."""
        total = torch.zeros((), device=self._order()[0].device)
        for parameter in reversed(self._order()):
            total = total + (torch.view_as_real(parameter) if parameter.is_complex() else parameter).sum().float() * 0
        return total


def _has_hooks(parameter: Tensor) -> bool:
    return any(getattr(parameter, name, None) for name in _HOOKS)
