"""Restore DDP's bucket order after a restart, from the first step on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def replay(model: DistributedDataParallel, reduced: Mapping[str, Tensor], buckets: Sequence[Sequence[str]]) -> bool:
    """Run a backward with gradients of zero that arrive in the order of these buckets.

    DDP rebuilds its buckets before the second forward, in the order of the first backward. After this call a resumed
    run has the buckets of an uninterrupted one from its first step on. The caller ensures that nothing is reduced
    meanwhile. Gradients are kept, and nothing is sent.

    Args:
        reduced: the parameters that DDP reduces, by name.
        buckets: the names in each bucket; other parameters come last.

    Returns:
        whether it was done. It is not if DDP never rebuilds its buckets (unused parameters, static graph), has mixed
        precision, or a parameter has hooks of the user, which would run.
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
    """Replaces the model: its output depends on all parameters, and every gradient is zero."""

    def __init__(self, order: Sequence[Tensor]) -> None:
        super().__init__()
        self._order: Callable[[], Sequence[Tensor]] = lambda: order  # hidden, so that nn.Module does not register them

    def forward(self, *_: Any) -> Tensor:
        """Return zero. Backward computes the gradient of the last added term first."""
        total = torch.zeros((), device=self._order()[0].device)
        for parameter in reversed(self._order()):
            total = total + (torch.view_as_real(parameter) if parameter.is_complex() else parameter).sum().float() * 0
        return total


def _has_hooks(parameter: Tensor) -> bool:
    return any(getattr(parameter, name, None) for name in _HOOKS)
