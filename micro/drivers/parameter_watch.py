"""Find an optimizer's parameters that no attachment averages. All attachments of a process share one watch."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.optim import Optimizer

from micro.drivers.optimizer_steps import StepListener
from micro.drivers.wrappers import ddp_models
from micro.values.names import SHOWN, listed
from micro.warn import warn

NO_BUCKET = (
    "gradients of {} are in none of the wrapped model's buckets, so that nothing averages them: the parameters were "
    "replaced, added, unfrozen or cast after the model was wrapped; wrap it, and attach, after that"
)
OUTSIDE = (
    "the optimizer trains {}, outside of the attached model: nothing averages the gradients, so that ranks differ in "
    "them. Wrap them in DistributedDataParallel too, in one nn.ModuleList with the model, unless each rank is to have "
    "its own"
)


class Averaging(Protocol):
    """Averages gradients of a model."""

    def averages(self, parameter: Tensor) -> bool:
        """Return whether gradients of ``parameter`` are averaged, if it is trained."""

    def present_parameters(self) -> Mapping[str, Tensor]:
        """Return the parameters of the model as it is now, by name."""


class ParameterWatch(StepListener):
    """Checks at each step that all gradients are averaged.

    A gradient of an attached model that is not averaged is an error. For other parameters of an optimizer that also
    trains an attached model, it warns once, unless a DistributedDataParallel or sharded model has them.
    """

    def __init__(self) -> None:
        self._models: WeakSet[Averaging] = WeakSet()
        self._others: WeakKeyDictionary[Optimizer, tuple[list[list[int]], list[Any]]] = WeakKeyDictionary()

    def add(self, model: Averaging) -> None:
        """Watch this model too."""
        self._models.add(model)
        self._others.clear()
        self.listen()

    def remove(self, model: Averaging) -> None:
        """Stop watching this model."""
        self._models.discard(model)
        self._others.clear()

    def check_gradients(self, optimizer: Optimizer) -> None:
        """Check the gradients of the optimizer's parameters that no attachment was known to average.

        Raises:
            ValueError: one belongs to an attached model.
        """
        if not self._models:
            return
        ids = [list(map(id, group["params"])) for group in optimizer.param_groups]
        known = self._others.get(optimizer)
        if known is None or known[0] != ids:
            known = self._others[optimizer] = ids, self._not_averaged(_parameters(optimizer))
        found = [parameter for parameter in known[1] if parameter.grad is not None]
        if found:
            self._judge(optimizer, self._not_averaged(found))
            known[1][:] = [parameter for parameter in self._not_averaged(known[1]) if parameter.grad is None]

    def _not_averaged(self, parameters: Iterable[Any]) -> list[Any]:
        return [each for each in parameters if not any(model.averages(each) for model in self._models)]

    def _judge(self, optimizer: Optimizer, found: list[Any]) -> None:
        """Raise or warn for ``found``, parameters with a gradient that no attachment averages."""
        present = {id(p): name for model in self._models for name, p in model.present_parameters().items()}
        names = [present[id(parameter)] for parameter in found if id(parameter) in present]
        if names:
            raise ValueError(NO_BUCKET.format(listed(names)))
        is_shared = any(id(p) in present or not self._not_averaged([p]) for p in _parameters(optimizer))
        if not found or not is_shared:
            return
        elsewhere = {id(parameter) for model in ddp_models() for parameter in model.parameters()}
        outside = [p for p in found if id(p) not in elsewhere and not hasattr(p, "to_local")]
        if outside:
            shapes = ", ".join(str(tuple(parameter.shape)) for parameter in outside[:SHOWN])
            warn(OUTSIDE.format(f"{len(outside)} parameters of shapes {shapes}" + ", ..." * (len(outside) > SHOWN)))


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


parameter_watch = ParameterWatch()
