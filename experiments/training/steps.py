"""The steps of a training: each worker's gradient, their reduction, and the optimizer's update; no records."""

from typing import Any

import torch

from experiments.config.schema import TrainConfig
from experiments.training.optimizers import build_optimizer, learning_rate, set_lr_, zero_gradients_
from experiments.training.round_workers import RoundWorkers
from experiments.training.workers import Reduced, Workers


class Steps:
    """The workers of a training and the optimizer of their model.

    Attributes:
        optimizer: of the averaged gradient.
    """

    def __init__(self, config: TrainConfig, workers: Workers) -> None:
        self._config, self._workers = config, workers
        self.optimizer = build_optimizer(config.optimizer, workers.task.model, config.lr)

    @property
    def optimizer_state(self) -> dict[str, Any]:
        """The state of the optimizer, which is the same on all ranks."""
        return self.optimizer.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        """Restore what ``optimizer_state`` was."""
        self.optimizer.load_state_dict(state)

    def take(self, step: int, epoch: int, index: int) -> tuple[float, Reduced]:
        """Take a step; return its learning rate, and what the reduction returned.

        Args:
            step: its number in the training.
            epoch, index: its epoch, and its number in there.

        Raises:
            NonFiniteGradient: a gradient held NaN or Inf and the policy is to stop.
        """
        lr = learning_rate(self._config, epoch + index / self._workers.num_steps)
        set_lr_(self.optimizer, self._config.optimizer, lr)
        zero_gradients_(self.optimizer)
        reduced = self._workers.reduce(step, lr)
        if not any(stats.skipped for stats in reduced.stats):
            self._clip_update(lr)
            self.optimizer.step()
        return lr, reduced

    def _clip_update(self, lr: float) -> None:
        chosen = self._config.optimizer
        if chosen.clip is not None and chosen.clip_at == "update":
            limit = chosen.clip * (lr if chosen.scales_gradients else 1.0)
            torch.nn.utils.clip_grad_norm_(self._workers.task.model.parameters(), limit)


class LocalTraining(Steps):
    """Steps that each worker's own optimizer takes; what it needs to go on is in the state of its rank."""

    def __init__(self, config: TrainConfig, workers: RoundWorkers) -> None:
        self._config, self._workers = config, workers

    @property
    def optimizer_state(self) -> dict[str, Any]:
        """Nothing: no state of an optimizer is the same on all ranks."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Do nothing; see optimizer_state."""

    def take(self, step: int, epoch: int, index: int) -> tuple[float, Reduced]:
        """Take a step; see Steps."""
        lr = learning_rate(self._config, epoch + index / self._workers.num_steps)
        return lr, self._workers.reduce(step, lr)


def steps_of(config: TrainConfig, workers: Workers) -> Steps:
    """Return how the workers take their steps."""
    return LocalTraining(config, workers) if isinstance(workers, RoundWorkers) else Steps(config, workers)
