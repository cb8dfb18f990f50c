"""Notes where a loop takes something away from an update between backward and the optimizer's step.

The update holds residuals of many steps, and what it holds has left them: what is cut off from it is lost. Of a
gradient that is removed the update is lost too, while what was not sent of it piles up.
"""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from micro.drivers.optimizer_steps import call_before_steps, stop_calling
from micro.names import listed
from micro.reducers.base import Reducer
from micro.reducers.dense import DenseReducer
from micro.reducers.wrapping import innermost

NUM_LOOKS = 20  # steps in which norms are compared, where gradients are written to after backward
SMALLER = 0.999  # a norm that is as much smaller has not only been rounded


def keeps(reducer: Reducer) -> bool:
    """Return whether a reducer keeps what it has not sent, so that something can be lost of it."""
    inner = innermost(reducer)
    return not isinstance(inner, DenseReducer) and getattr(getattr(inner, "feedback", None), "name", "") != "none"


class ChangedGradients:
    """Compares the gradients at the end of a reduced backward with those that an optimizer is about to use.

    Norms are taken only after a step whose gradients were written to, in at most NUM_LOOKS steps. Each note is made
    once.

    Args:
        parameters: the model's by name, as far as they are reduced.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._had: set[int] = set()
        self._versions = 0
        self._norm: float | None = None
        self._was_written = self._has_noted_removal = False
        self._looks_left = NUM_LOOKS
        call_before_steps(self)

    def end_backward(self, *, is_applied: bool) -> None:
        """Note the gradients of a backward; ``is_applied`` tells whether they are for a step."""
        present = [p for p in self._parameters.values() if p.grad is not None] if is_applied else []
        self._had = set(map(id, present))
        self._versions = _versions_of(present)
        self._norm = self._norm_of(present) if self._was_written and self._looks_left > 0 else None

    def before_step(self, optimizer: Optimizer) -> None:
        """Compare the gradients that ``optimizer`` is about to use, unless it has stepped since."""
        held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._had]
        present = [p for p in held if p.grad is not None]
        if not present:
            return
        if len(present) < len(held) and not self._has_noted_removal:
            self._has_noted_removal = True
            removed = [self._names[id(p)] for p in held if p.grad is None]
            warnings.warn(
                f"gradients of {listed(removed)} were removed after backward: what was not sent of them piles up, and "
                "is applied at once later: reduce these parameters by dense= of micro.attach, or freeze them meanwhile",
                stacklevel=2,
            )
        if len(present) == len(self._had):
            self._look_at_norm(present)
        self._had = set()

    def _look_at_norm(self, present: list[Tensor]) -> None:
        if self._looks_left > 0 and self._norm is None:
            self._was_written = _versions_of(present) != self._versions
        if self._norm is None:
            return
        self._looks_left -= 1
        share = self._norm_of(present) / self._norm if self._norm else 1.0
        if share < SMALLER:
            self._looks_left = 0
            warnings.warn(
                f"gradients were scaled to {share:.2g} of what was reduced, as clip_grad_norm_ and unscale_ do: what "
                "is cut off from a sparse update is lost. Use clip= of micro.attach instead, and give it the scaler",
                stacklevel=2,
            )

    @staticmethod
    def _norm_of(parameters: list[Tensor]) -> float:
        norms = [torch.linalg.vector_norm(p.grad.float()) for p in parameters]  # type: ignore[union-attr]
        return float(torch.stack(norms).norm()) if norms else 0.0  # host sync: in few steps

    def close(self) -> None:
        """Stop looking."""
        stop_calling(self)


def _versions_of(parameters: list[Tensor]) -> int:
    """Return a number that each write in place to any of the gradients raises."""
    return sum(p.grad._version for p in parameters if p.grad is not None)
