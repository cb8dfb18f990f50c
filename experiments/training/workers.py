"""The interface between the training loop and the workers of a run, real or simulated."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import micro
from experiments.config.schema import TrainConfig
from experiments.training.tasks import Carry, Task
from micro.local import RoundStats
from micro.nonfinite import NonFiniteGradient
from micro.planning.schedules.base import Plan

WARM_UP_STEPS = 2  # the second finds thresholds, and the state of a text, where the first left them


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a step returns.

    Attributes:
        loss: of rank 0's batches.
        stats: of the step on rank 0, one per bucket.
        compute_s: seconds of forward and backward without the reduction, summed over the ranks of this process.
        exposed_s: seconds of the reduction that backward did not hide.
        load_s: seconds of drawing the batches, summed like compute_s.
        rounds: what the exchanges of local steps report that this step has ended; none where gradients are exchanged.
    """

    loss: Tensor
    stats: tuple[micro.StepStats, ...]
    compute_s: float
    exposed_s: float
    load_s: float
    rounds: tuple[RoundStats, ...] = ()


class Workers(ABC):
    """The workers of a run that this process holds: one rank, or all.

    Attributes:
        task: model and data.
        is_main: whether rank 0 is among the ranks of this process.
        ranks: the ranks of this process.
        num_batches: batches of each rank in an epoch.
        plan: the plan of the buckets, None without one.
    """

    task: Task
    is_main: bool
    ranks: Sequence[int]
    num_batches: int
    plan: Plan | None = None

    def __init__(self, config: TrainConfig, task: Task) -> None:
        self.task, self._config = task, config

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.task.device

    @property
    def num_ranks(self) -> int:
        """How many workers there are, those of other processes included."""
        return self._config.world_size

    @property
    def num_steps(self) -> int:
        """Steps of an epoch."""
        return self.num_batches // self._config.accumulate

    @abstractmethod
    def start_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Start drawing the batches of an epoch at step ``start``; start 0 also resets the carries."""

    @abstractmethod
    def take_step(self, step: int, lr: float) -> Reduced:
        """Draw each rank's batches, compute their gradients, exchange and step.

        Args:
            step: its number in the training.
            lr: the learning rate.

        Raises:
            NonFiniteGradient: a gradient held NaN or Inf and the policy is to stop.
        """

    @property
    def optimizer_state(self) -> dict[str, Any]:
        """The state of an optimizer that is the same on all ranks; empty where there is none."""
        return {}

    def load_optimizer(self, state: dict[str, Any]) -> None:  # noqa: B027 - where there is none
        """Restore what ``optimizer_state`` was."""

    @abstractmethod
    def evaluate(self) -> Tensor:
        """Return the task's sums over the whole test set."""

    @abstractmethod
    def gather_items(self, item: Any) -> list[Any]:
        """Return the item of every process of the run, in rank order."""

    @abstractmethod
    def residuals(self) -> list[Tensor]:
        """Return the residuals of this process's first rank, one vector per bucket; empty ones where it has none."""

    def residual_norm(self) -> float | None:
        """Return the L2 norm of ``residuals``, None where there are none; this reads the whole vector once more."""
        kept = [residual for residual in self.residuals() if residual.numel()]
        if not kept:
            return None
        if self.task.device.type == "cuda":
            torch.cuda.synchronize(self.task.device)  # residuals are written on a stream of their own
        return float(torch.stack([torch.linalg.vector_norm(residual) for residual in kept]).norm())

    @abstractmethod
    def states(self) -> list[dict[str, Any]]:
        """Return, for each rank of this process, its own state: residuals, thresholds, boundaries, carries."""

    @abstractmethod
    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore what ``states`` returned."""

    def warm_up(self) -> None:
        """Take steps and take them back: what is compiled when it is first used is compiled before the first step.

        Called before the first step, and before a state is loaded. The weights stay as they are.
        """
        self.start_epoch(0)
        with self._taken_back(), kept_buffers(self.task.model):
            for step in range(min(WARM_UP_STEPS, self.num_steps)):
                with suppress(NonFiniteGradient):
                    self._rehearse_step(step)

    @abstractmethod
    def _rehearse_step(self, step: int) -> None:
        """Do what a step computes and sends; the state that it changes is taken back."""

    @contextmanager
    def _taken_back(self) -> Iterator[None]:
        """Restore the states of the ranks when the context ends."""
        before = self.states()
        yield
        self.load_states(before)

    def close(self) -> None:  # noqa: B027 - real workers have nothing to end
        """End the threads of the workers."""


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore a model's buffers when the context ends."""
    kept = [buffer.clone() for buffer in learnt_buffers(model)]
    yield
    for buffer, before in zip(learnt_buffers(model), kept, strict=True):
        buffer.copy_(before)


def learnt_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers that training changes, such as batch norm's: those that are part of the model's state."""
    parameters = {id(parameter) for parameter in model.parameters()}
    state = model.state_dict(keep_vars=True).values()
    return [tensor for tensor in state if id(tensor) not in parameters]


def moved_to(carry: Carry, device: torch.device) -> Carry:
    """Return a carry on a device."""
    return None if carry is None else tuple(part.to(device) for part in carry)
