"""The outer optimizer of local steps, which uses the mean weight difference of a round as a gradient."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import SGD, Optimizer

from micro.reducers.base import BucketState

MakeOuter = Callable[[list[Tensor]], Optimizer]
"""Makes an optimizer for the global weights, one tensor per parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """SGD on the global weights. With lr=1 and no momentum, the new weights are the mean of the ranks' weights.

    Args:
        lr: factor on the mean weight difference, which already includes the inner learning rate. Not zero.
        momentum: in [0, 1).
        nesterov: as in torch.optim.SGD. DiLoCo uses lr 0.7, momentum 0.9 and nesterov.

    Raises:
        ValueError: a value out of its range, or nesterov without momentum.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr of the outer optimizer must be above 0, got {self.lr}: with 0 no weight would move")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum of the outer optimizer must be in [0, 1), got {self.momentum}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov of the outer optimizer needs a momentum above 0, got 0")

    def __call__(self, weights: list[Tensor]) -> Optimizer:
        """Return the optimizer of ``weights``."""
        return SGD(weights, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)


def check_outer(outer: object, state: BucketState, *, allows_both: bool) -> None:
    """Raise ValueError for an outer optimizer with lr 0, or with momentum in addition to a residual."""
    if not isinstance(outer, Optimizer):
        raise ValueError(f"outer must make a torch.optim.Optimizer, got {type(outer).__name__}: use micro.Outer")
    if any(group.get("lr") == 0 for group in outer.param_groups):
        raise ValueError("lr of the outer optimizer must not be 0: no weight would move")
    has_momentum = any(_first(group.get("momentum")) or _first(group.get("betas")) for group in outer.param_groups)
    if has_momentum and state.residual.numel() and not allows_both:
        raise ValueError(
            "outer momentum and a residual both accumulate what was not applied at once, which counts it twice: use "
            "momentum=0 of the outer optimizer, feedback none, or set momentum_with_feedback=True"
        )


def _first(value: float | Sequence[float] | None) -> float:
    """Return the momentum, the first of betas, or 0."""
    first = value[0] if isinstance(value, Sequence) and value else value
    return float(first) if isinstance(first, int | float) else 0.0
