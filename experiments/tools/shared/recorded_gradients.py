"""Record the gradients of a real training, one per worker and step."""

from collections.abc import Iterator

import torch
from torch import Tensor

import data
import micro
from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.tools.shared.gradient_sources import RECORDED, Gradients, check_size
from experiments.training.optimizers import learning_rate
from experiments.training.preflight import prepare_runs, shapes_of
from experiments.training.simulated_workers import SimulatedWorkers
from experiments.training.tasks import load_task

FIXED = ("sparsifier=", "cluster=", "cluster.", "density=")  # settings that a recording fixes


def training_config(overrides: list[str], world_size: int) -> TrainConfig:
    """Return the configuration of a dense training on ``world_size`` simulated workers; words as for train.

    Raises:
        UserError: invalid words, or a setting that a recording fixes.
    """
    for word in overrides:
        if word.startswith(FIXED):
            raise UserError(f"'{word}': a recording settles sparsifier, cluster and density itself, leave it out")
    fixed = ["sparsifier=dense", "cluster=simulated", "cluster.device=cpu", f"cluster.world_size={world_size}"]
    (config,) = prepare_runs([[*overrides, *fixed]])
    return config


def numel_of(config: TrainConfig) -> int:
    """Return the number of elements of a checked training's gradient, without building its model."""
    sizes = data.info(config.dataset.name, config.dataset.root, **config.dataset.settings).sizes
    return sum(p.numel() for p in shapes_of(config, sizes).parameters() if p.requires_grad)


class Training:
    """A configured training on simulated workers that yields their gradients.

    Workers and steps are those of ``experiments.train``, without evaluation or records.

    Args:
        reducer: replaces the configured one.

    Attributes:
        layout: names and shapes of a gradient, in the order of backward.
    """

    def __init__(self, config: TrainConfig, *, reducer: micro.Reducer | None = None) -> None:
        if config.rounds.every:
            raise UserError(
                f"rounds.every={config.rounds.every}: gradients are exchanged at every step here, leave it out"
            )
        if config.start_from is not None:
            raise UserError(f"start_from={config.start_from}: this training starts from step 0, leave it out")
        self._config = config
        self._workers = SimulatedWorkers(config, load_task(config, torch.device("cpu")), reducer=reducer)
        self.layout = self._workers.layout

    def steps(self, num_steps: int) -> Iterator[Tensor]:
        """Train; yield after each step the workers' gradients (world_size, numel), scaled and clipped.

        Every step yields the same tensor. Epochs repeat until there are enough steps.

        Raises:
            UserError: more steps than the learning-rate schedule has, or a gradient with NaN or Inf.
        """
        per_epoch = self._workers.num_steps
        self._check_length(num_steps)
        rows = torch.empty(self._config.world_size, self.layout.numel)
        self._workers.watch = lambda rank, gradient: rows[rank].copy_(gradient)
        for step in range(num_steps):
            epoch, index = divmod(step, per_epoch)
            if index == 0:
                self._workers.start_epoch(epoch)
            try:
                self._workers.take_step(step, learning_rate(self._config, epoch + index / per_epoch))
            except micro.NonFiniteGradient as error:
                raise UserError(f"the training to record: {error}") from None
            yield rows

    def _check_length(self, num_steps: int) -> None:
        """Refuse steps after the end of a schedule that falls to 0; schedules with milestones have no end."""
        most = self._config.epochs * self._workers.num_steps
        if num_steps > most and self._config.lr_shape != "steps":
            raise UserError(
                f"{num_steps} steps are to be recorded, but {self._config.epochs} epochs have {most}, after which the "
                f"learning rate (lr_shape={self._config.lr_shape}) is 0: lower the steps, or raise epochs"
            )

    def update(self) -> Tensor:
        """Return the update (numel,) of the last step, not copied."""
        return self._workers.update

    def residual(self) -> Tensor:
        """Return rank 0's residual (numel,), not copied."""
        return self._workers.residuals()[0]


def record(overrides: list[str], *, num_steps: int, world_size: int, max_gb: float = 1.0) -> Gradients:
    """Train densely and return all workers' gradients of each exchange.

    Raises:
        UserError: an invalid training, or gradients that need more memory than allowed.
    """
    training = Training(training_config(overrides, world_size))
    check_size(num_steps, world_size, training.layout.numel, max_gb)
    kept = torch.empty(num_steps, world_size, training.layout.numel)
    for step, rows in enumerate(training.steps(num_steps)):
        kept[step] = rows
    return Gradients(RECORDED, training.layout, kept)
