"""Steps by the sign of the gradient."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class SignSGD(Optimizer):
    """Move every weight by the learning rate, against the sign of its gradient; a gradient of zero moves nothing.

    The optimizer behind DeMo's compressor: of the mean update of all ranks it takes the sign. Ranks must hold the same
    bits of the update, for the smallest difference around zero is a whole step.

    Args:
        params: parameters or groups of them.
        lr: how far a weight moves.
        weight_decay: share of each weight, times lr, that a step takes off it; apart from the sign.

    Raises:
        ValueError: lr or weight_decay is negative or not finite.

    Source: Bernstein et al., signSGD, ICML 2018, arXiv 1802.04434; as a step behind a compressed momentum: Peng et al.,
    DeMo, 2024, arXiv 2411.19870.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], *, lr: float, weight_decay: float = 0.0
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} of SignSGD must be at least 0, got {value}")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move each parameter that has a gradient; return what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])
        return loss
