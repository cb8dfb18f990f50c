"""Workers that reduce gradients at every step; the optimizer of their one model takes the mean."""

from abc import abstractmethod
from typing import Any

import torch

from experiments.config.schema import TrainConfig
from experiments.training.optimizers import build_optimizer, set_lr_, zero_gradients_
from experiments.training.tasks import Task
from experiments.training.workers import Reduced, Workers


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
