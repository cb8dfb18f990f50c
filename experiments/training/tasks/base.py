"""The interface of a task: a model, its data, its loss and its quality measures."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import data
from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig

Batch = tuple[Tensor, ...]
Carry = tuple[Tensor, ...] | None


class Task(ABC):
    """One model, and each rank's share of the data, for any number of ranks.

    Attributes:
        model: on its device, with the run's first weights.
        checksums: of the data files.
    """

    def __init__(self, config: TrainConfig, model: nn.Module, content: Any, device: torch.device) -> None:
        self.config, self.model, self.content, self.device = config, model, content, device

    @property
    def checksums(self) -> dict[str, str]:
        """Checksums of the data files."""
        return self.content.checksums

    @property
    def unused(self) -> tuple[str, ...]:
        """Files that lie beside the data and are not part of it."""
        return ()

    @property
    def words_per_batch(self) -> int:
        """Words that a rank's batch trains on; 0 where it has none."""
        return 0

    def loss(self, model: nn.Module, batch: Batch, carry: Carry = None) -> tuple[Tensor, Carry]:
        """Return the mean loss of a batch, and the state that the model carries to the rank's next batch.

        Args:
            model: the task's model, or its DDP wrapper.
            carry: the state after the rank's previous batch, None at the start of an epoch.
        """
        with self._precision():
            return self.objective(model, batch, carry)

    @torch.no_grad()
    def evaluate(self, rank: int, world_size: int) -> Tensor:
        """Return (m,) float64 sums over a rank's share of the test set, the last of them the number of samples."""
        self.model.eval()
        with self._precision():
            sums = self.test_sums(rank, world_size)
        self.model.train()
        return sums

    def _precision(self) -> AbstractContextManager[object]:
        mixed = self.config.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16) if mixed else nullcontext()

    def seed(self, step: int, rank: int) -> None:
        """Seed the generator of a forward pass (dropout): its numbers depend on seed, step and rank alone.

        Only that of the task's device: torch.manual_seed visits every kind of accelerator and takes half a millisecond.
        """
        seed = data.mix(self.config.seed, step, rank)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)

    def zeros(self, num: int) -> Tensor:
        """Return (num,) float64 zeros to add up in."""
        return torch.zeros(num, dtype=torch.float64, device=self.device)

    @abstractmethod
    def batches(self, rank: int) -> data.Batches:
        """Return a rank's training batches."""

    @abstractmethod
    def objective(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the mean loss of a batch and the next carry; see loss."""

    @abstractmethod
    def test_sums(self, rank: int, world_size: int) -> Tensor:
        """Return the sums of ``evaluate``, which calls this in evaluation mode and without gradients."""

    @staticmethod
    @abstractmethod
    def measures(sums: Tensor) -> dict[str, float]:
        """Return the quality measures, from the sums over all ranks."""

    @staticmethod
    @abstractmethod
    def check(config: TrainConfig) -> None:
        """Raise UserError where the data set's settings do not fit this kind of task."""

    @staticmethod
    @abstractmethod
    def num_batches(config: TrainConfig, num_train: int) -> int:
        """Return how many batches each rank has in an epoch."""

    @staticmethod
    def fewest_test(config: TrainConfig) -> int:
        """Return how many words the test text must have; 0 for other data."""
        return 0


def refuse_settings(config: TrainConfig, **defaults: Any) -> None:
    """Raise UserError if a setting of the data set that this task ignores is not at its default."""
    for key, default in defaults.items():
        given = getattr(config.dataset, key)
        if given != default:
            raise UserError(f"dataset.{key} means nothing for model {config.model.name}, got {given}: leave it out")


def need_setting(config: TrainConfig, key: str) -> int:
    """Return a setting of the data set that must be a number of at least 1, or raise UserError."""
    given = getattr(config.dataset, key)
    if given is None or given < 1:
        raise UserError(f"dataset.{key} must be at least 1 for model {config.model.name}, got {given}")
    return given
