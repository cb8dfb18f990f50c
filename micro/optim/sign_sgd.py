"""The optimizer SignSGD, whose steps depend only on the sign of the gradient."""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from micro.optim.waits import Received, WaitingOptimizer, check_max_steps


class SignSGD(WaitingOptimizer):
    """Move every weight by the learning rate, against the sign of its gradient; a gradient of zero moves nothing.

    DeMo uses it: the sign of the mean update over ranks. The update must be bitwise equal on all ranks, because a tiny
    difference around zero is a whole step.

    ``max_steps`` is for sparse updates with error feedback: a weight that waited for tau steps moves by tau times the
    learning rate, at most max_steps times. It keeps no moments. How arrivals are detected: see micro.SparseAdamW.

    Args:
        params: parameters or groups of them.
        lr: distance that a weight moves in a step.
        weight_decay: decoupled, times lr.
        max_steps: most steps that an element takes at once; 1: waits are not counted.

    Raises:
        ValueError: a setting is out of its range.

    Source: Bernstein et al., signSGD, ICML 2018, arXiv 1802.04434; as a step behind a compressed momentum: Peng et al.,
    DeMo, 2024, arXiv 2411.19870. Steps for a wait: no source known.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float = 0.0,
        max_steps: float = 1,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} of SignSGD must be at least 0, got {value}")
        check_max_steps(self, max_steps)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "max_steps": max_steps})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state; older ones have no max_steps."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("max_steps", 1)

    def _counts_waits(self, group: dict[str, Any]) -> bool:
        return bool(group["max_steps"] > 1)

    def _update_whole_(self, received: list[Received], group: dict[str, Any]) -> None:
        for each in received:
            each.parameter.mul_(1 - group["lr"] * group["weight_decay"])
            each.parameter.sub_(each.grad.sign(), alpha=group["lr"])

    def _update_(self, received: Iterable[list[Received]], group: dict[str, Any]) -> None:
        for each in (each for alike in received for each in alike):
            assert each.tau is not None
            each.parameter.mul_(1 - group["lr"] * group["weight_decay"])
            steps = each.tau.clamp_(max=group["max_steps"]).to(each.grad.dtype)
            each.parameter.sub_(steps.mul_(each.grad.sign()), alpha=group["lr"])
