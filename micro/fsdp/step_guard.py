"""Refuse optimizer steps with gradients that the replicas have not averaged, which would make their weights differ."""

from collections.abc import Sequence

from torch.optim import Optimizer

from micro.drivers.optimizer_steps import StepListener
from micro.fsdp.groups import ShardGroup
from micro.fsdp.vectors import own_gradient
from micro.values.names import listed


class StepGuard(StepListener):
    """Checks the gradients before each step of an optimizer with parameters of these groups.

    Gradients wait for the replicas after a paused or interrupted backward. The next backward that finishes exchanges
    them too, unless they are removed before.
    """

    def __init__(self, groups: Sequence[ShardGroup]) -> None:
        self._groups = groups
        self.listen()

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise ValueError if the optimizer would use a waiting gradient."""
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
