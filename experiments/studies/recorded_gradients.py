"""Record the gradients of a real training, one per worker and step."""

from collections.abc import Iterator

import torch
from torch import Tensor

import data
import micro
from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.studies.gradient_sources import RECORDED, Gradients, check_size
from experiments.training.optimizers import build_optimizer, learning_rate, set_lr_
from experiments.training.preflight import prepare_runs, shapes_of
from experiments.training.seeding import seed_step
from experiments.training.tasks import Batch, Carry, load_task

FIXED = ("sparsifier=", "cluster=", "cluster.", "density=")  # settings that a recording chooses itself


def training_config(overrides: list[str], world_size: int) -> TrainConfig:
    """Return the configuration of a dense training on that many simulated workers; words as for train.

    Raises:
        UserError: words that describe no training, or that name a setting which a recording chooses itself.
    """
    for word in overrides:
        if word.startswith(FIXED):
            raise UserError(f"'{word}': a recording settles sparsifier, cluster and density itself, leave it out")
    fixed = ["sparsifier=dense", "cluster=simulated", "cluster.device=cpu", f"cluster.world_size={world_size}"]
    (config,) = prepare_runs([[*overrides, *fixed]])
    return config


def numel_of(config: TrainConfig) -> int:
    """Return how many elements a gradient of a checked training has, without making its model."""
    sizes = data.info(config.dataset.name, config.dataset.root, **config.dataset.settings).sizes
    return sum(p.numel() for p in shapes_of(config, sizes).parameters() if p.requires_grad)


class Training:
    """A training on n workers in one process that hands out each step's gradients and waits for the update.

    One model stands for all workers, as their replicas are equal; batch-norm statistics are rank 0's, as DDP keeps
    them.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._task = load_task(config, torch.device("cpu"))
        named = [(name, p) for name, p in self._task.model.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        self.layout = micro.Layout.of(named)
        self._batches = [self._task.batches(rank) for rank in range(config.world_size)]
        self._optimizer = build_optimizer(config.optimizer, self._task.model, config.lr)

    def steps(self, num_steps: int) -> Iterator[Tensor]:
        """Yield the gradients (world_size, numel) of each step; the first row is then the update that is applied.

        The tensor is the same at every step. Epochs follow one another until there were enough steps.
        """
        num_batches = self._batches[0].num_batches
        rows = torch.empty(self._config.world_size, self.layout.numel)
        for step in range(num_steps):
            epoch, index = divmod(step, num_batches)
            if index == 0:
                epochs = [batches.epoch(epoch) for batches in self._batches]
                self._carries: list[Carry] = [None] * len(epochs)
            for rank, batches in enumerate(epochs):
                self._gradient_into_(rows[rank], step, rank, next(batches))
            yield rows
            self._apply(rows[0], epoch + index / num_batches)

    def _gradient_into_(self, row: Tensor, step: int, rank: int, batch: Batch) -> None:
        model = self._task.model
        kept = [buffer.clone() for buffer in model.buffers()] if rank else []
        seed_step(self._config.seed, step, rank, self._task.device)
        loss, self._carries[rank] = self._task.loss(model, batch, self._carries[rank])
        gradients = torch.autograd.grad(loss, self._parameters)
        torch.cat([gradient.reshape(-1) for gradient in gradients], out=row)
        for buffer, before in zip(model.buffers(), kept, strict=False):
            buffer.copy_(before)

    def _apply(self, update: Tensor, epoch: float) -> None:
        set_lr_(self._optimizer, self._config.optimizer, learning_rate(self._config, epoch))
        for parameter, gradient in zip(self._parameters, self.layout.views(update).values(), strict=True):
            parameter.grad = gradient
        self._optimizer.step()


def record(overrides: list[str], *, num_steps: int, world_size: int, max_gb: float = 1.0) -> Gradients:
    """Train densely and return every worker's gradients.

    Raises:
        UserError: no such training, or gradients that need more memory than allowed.
    """
    training = Training(training_config(overrides, world_size))
    check_size(num_steps, world_size, training.layout.numel, max_gb)
    kept = torch.empty(num_steps, world_size, training.layout.numel)
    for step, rows in enumerate(training.steps(num_steps)):
        kept[step] = rows
        rows[0] = rows.mean(0)
    return Gradients(RECORDED, training.layout, kept)
