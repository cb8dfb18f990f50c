"""Refuses an optimizer's step with gradients that the replicas have not averaged: their weights would part ways."""

from collections.abc import Sequence

from torch.optim import Optimizer

from micro.drivers.optimizer_steps import StepListener
from micro.fsdp.groups import ShardGroup
from micro.fsdp.vectors import own_gradient
from micro.values.names import listed


class StepGuard(StepListener):
    """Looks at the gradients before each step of a torch.optim.Optimizer that holds parameters of these groups.

    A gradient waits for the replicas after a backward that was paused, or that an exception broke off. It is part of
    the next backward that reaches its end, unless it is removed before.
    """

    def __init__(self, groups: Sequence[ShardGroup]) -> None:
        self._groups = groups
        self.listen()

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise ValueError if the optimizer would use a gradient that waits."""
        waiting = [group for group in self._groups if group.waiting_dtype is not None]
        if not waiting:
            return
        stepped = {id(parameter) for each in optimizer.param_groups for parameter in each["params"]}
        names = [
            name
            for group in waiting
            for name, parameter in group.parameters().items()
            if id(parameter) in stepped and (gradient := own_gradient(parameter)) is not None and gradient.any()
        ]
        if names:
            raise ValueError(
                f"gradients of {listed(names)} are this node's own, of a backward that was paused or that an exception "
                "broke off: remove them by zero_grad() before the optimizer steps"
            )
