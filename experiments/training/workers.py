"""The interface between the training loop and the workers of a run, real or simulated, and their shared code."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import micro
from experiments.config.schema import TrainConfig
from experiments.planning.schedules.base import Plan
from experiments.training.optimizers import build_optimizer, set_lr_, zero_gradients_
from experiments.training.tasks import Batch, Carry, Task
from micro.comm.group import GroupComm
from micro.comm.objects import gather_objects
from micro.comm.requests import AllReduce, Broadcast
from micro.local import RoundStats
from micro.values.nonfinite import NonFiniteGradient

WARM_UP_STEPS = 2  # the second finds thresholds, and the state of a text, where the first left them


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a step returns.

    Attributes:
        loss: of rank 0's batches.
        stats: of the step on rank 0, one per bucket.
        compute_s: seconds of forward and backward without the reduction, summed over the ranks of this process.
        forward_s: of these, the seconds of forward.
        exposed_s: seconds of the reduction that backward did not hide.
        load_s: seconds of drawing the batches, summed like compute_s.
        rounds: what the exchanges of local steps report that this step has ended; none where gradients are exchanged.
    """

    loss: Tensor
    stats: tuple[micro.StepStats, ...]
    compute_s: float
    forward_s: float
    exposed_s: float
    load_s: float
    rounds: tuple[RoundStats, ...] = ()


class Workers(ABC):
    """The workers of a run that this process holds: one rank of a process group, or all, which are simulated.

    Attributes:
        task: model and data.
        is_main: whether rank 0 is among the ranks of this process.
        ranks: the ranks of this process.
        num_batches: batches of each rank in an epoch.
        plan: the plan of the buckets, None without one.
    """

    plan: Plan | None = None

    def __init__(self, config: TrainConfig, task: Task) -> None:
        self.task, self.device, self._config = task, task.device, config
        self.num_ranks = config.world_size  # those of other processes included
        self._comm = None if config.cluster.simulated else GroupComm(timed=config.timed)
        self.ranks: Sequence[int] = [self._comm.rank] if self._comm else range(config.world_size)
        self.is_main = self.ranks[0] == 0
        self._batches = [task.batches(rank) for rank in self.ranks]
        self.num_batches = self._batches[0].num_batches
        self._epochs: list[Iterator[Batch]] = []
        self._carries: list[Carry] = [None] * len(self.ranks)
        self._now = self._comm.now if self._comm else lambda _device: time.perf_counter()
        self._forwards: list[tuple[float, float]] = []  # since the batches were drawn: when each began, and ended

    @property
    def num_steps(self) -> int:
        """Steps of an epoch."""
        return self.num_batches // self._config.accumulate

    def start_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Start drawing the batches of an epoch at step ``start``; start 0 also resets the carries."""
        first = start * self._config.accumulate
        self._epochs = [batches.epoch(epoch, start=first) for batches in self._batches]
        if not start:
            self._carries = [None] * len(self.ranks)

    @abstractmethod
    def take_step(self, step: int, lr: float) -> Reduced:
        """Draw each rank's batches, compute their gradients, exchange and step.

        Raises:
            NonFiniteGradient: a gradient held NaN or Inf and the policy is to stop.
        """

    @property
    def optimizer_state(self) -> dict[str, Any]:
        """The state of an optimizer that is the same on all ranks; empty where there is none."""
        return {}

    def load_optimizer(self, state: dict[str, Any]) -> None:  # noqa: B027 - where there is none
        """Restore what ``optimizer_state`` was."""

    def evaluate(self) -> Tensor:
        """Return the task's sums over the whole test set, with rank 0's batch-norm statistics."""
        if self._comm is None:
            return self.task.evaluate(0, 1)
        for buffer in learnt_buffers(self.task.model):
            self._comm.answer(Broadcast(mine=buffer, source=0))
        return self._comm.answer(AllReduce(mine=self.task.evaluate(self._comm.rank, self._comm.world_size)))

    def gather_items(self, item: Any) -> list[Any]:
        """Return the item of every process of the run, in rank order."""
        return gather_objects(item) if self._comm else [item]

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

    def close(self) -> None:  # noqa: B027 - not all have something to let go of
        """Let go of groups and threads."""

    def _draw(self) -> list[list[Batch]]:
        """Return the batches of a step for each rank of this process."""
        self._forwards.clear()
        return [[next(epoch) for _ in range(self._config.accumulate)] for epoch in self._epochs]

    def _backward(
        self,
        model: nn.Module,
        place: int,
        batches: Sequence[Batch],
        scale: float,
        *,
        hold: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Tensor:
        """Add the gradients of batches up; return the mean of their losses.

        Args:
            place: of the rank in ``ranks``.
            scale: factor of each loss.
            hold: the context of all batches but the last.
        """
        losses = []
        for number, batch in enumerate(batches, start=1):
            with hold() if number < len(batches) else nullcontext():
                began = self._now(self.device)
                loss, self._carries[place] = self.task.loss(model, batch, self._carries[place])
                self._forwards.append((began, self._now(self.device)))
                (loss if scale == 1 else loss * scale).backward()
            losses.append(loss.detach())
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _forward_s(self) -> float:
        """Return the seconds of the step's forward passes, once they are over."""
        return sum(ended - began for began, ended in self._forwards)


class GradientWorkers(Workers):
    """One model, whose gradients the ranks compute and reduce, and its optimizer, the same on all ranks."""

    def __init__(self, config: TrainConfig, task: Task) -> None:
        super().__init__(config, task)
        self._optimizer = build_optimizer(config.optimizer, task.model, config.lr)

    @abstractmethod
    def reduce(self, step: int, lr: float) -> Reduced:
        """Draw each rank's batches, compute the gradients and reduce them; the caller has set them to zero."""

    def take_step(self, step: int, lr: float) -> Reduced:
        """Reduce the gradients and update the weights, unless the step is skipped."""
        set_lr_(self._optimizer, self._config.optimizer, lr)
        zero_gradients_(self._optimizer)
        reduced = self.reduce(step, lr)
        if not any(stats.skipped for stats in reduced.stats):
            if (limit := self._clip(lr, at="update")) is not None:
                torch.nn.utils.clip_grad_norm_(self.task.model.parameters(), limit)
            self._optimizer.step()
        return reduced

    @property
    def optimizer_state(self) -> dict[str, Any]:
        """The state of the optimizer."""
        return self._optimizer.state_dict()

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Restore what ``optimizer_state`` was."""
        self._optimizer.load_state_dict(state)

    def _rehearse_step(self, step: int) -> None:
        zero_gradients_(self._optimizer)
        self.reduce(step, self._config.lr)

    def _scale(self, lr: float) -> float:
        """Return the factor of each loss: with it the gradients of a step's batches add up to their mean."""
        return (lr if self._config.optimizer.scales_gradients else 1.0) / self._config.accumulate

    def _clip(self, lr: float, *, at: str = "gradient") -> float | None:
        """Return the limit on the norm of the scaled gradients, of the workers or of the update; None for no limit."""
        chosen = self._config.optimizer
        if chosen.clip is None or chosen.clip_at != at:
            return None
        return chosen.clip * (lr if chosen.scales_gradients else 1.0)


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


def kind_of_workers(config: TrainConfig) -> Callable[[TrainConfig, Task], Workers]:
    """Return what workers the run has, and load no others: in this process or not, exchanging at each step or round."""
    if config.rounds.every:
        from experiments.training.round_workers import RoundWorkers

        return RoundWorkers
    if config.cluster.simulated:
        from experiments.training.simulated_workers import SimulatedWorkers

        return SimulatedWorkers
    from experiments.training.ddp_workers import DdpWorkers

    return DdpWorkers
