"""What is learnt: the model, its data, its loss and how well it does."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import data
from experiments.harness.config import TrainConfig, build_model
from experiments.harness.seeding import seed_model

Batch = tuple[Tensor, Tensor]
EVAL_BATCH = 500


@dataclass(frozen=True, slots=True)
class Task:
    """Image classification for any number of ranks: one model, and each rank's share of the data.

    Attributes:
        model: on its device, with the run's first weights.
        checksums: of what was read.
    """

    config: TrainConfig
    model: nn.Module
    content: data.Classification
    device: torch.device
    checksums: dict[str, str]

    @classmethod
    def load(cls, config: TrainConfig, device: torch.device) -> "Task":
        """Read the data and make the model."""
        content = data.load(config.dataset.name, root=config.dataset.root, seed=config.seed, **config.dataset.settings)
        seed_model(config.seed)
        model = build_model(config, content.in_channels, content.num_classes).to(device)
        return cls(config, model, content, device, content.checksums)

    def batches(self, rank: int) -> data.ShardedBatches:
        """Return a rank's training batches."""
        return data.ShardedBatches(
            self.content.train_inputs.to(self.device),
            self.content.train_targets.to(self.device),
            batch_size=self.config.batch_size,
            rank=rank,
            world_size=self.config.world_size,
            seed=self.config.seed,
            augment=self.config.dataset.augment,
            mean=self.content.mean,
            std=self.content.std,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets)

    @torch.no_grad()
    def evaluate(self, rank: int, world_size: int) -> Tensor:
        """Return (3,) float64 sums over a rank's share of the test set: loss, correct answers, samples."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.model.eval()
        for inputs, targets in self._test_batches(rank, world_size):
            outputs = self.model(inputs)
            sums[0] += F.cross_entropy(outputs, targets, reduction="sum")
            sums[1] += (outputs.argmax(1) == targets).sum()
            sums[2] += len(targets)
        self.model.train()
        return sums

    def _test_batches(self, rank: int, world_size: int) -> Iterator[Batch]:
        return iter(
            data.EvalBatches(
                self.content.test_inputs.to(self.device),
                self.content.test_targets.to(self.device),
                batch_size=EVAL_BATCH,
                rank=rank,
                world_size=world_size,
                mean=self.content.mean,
                std=self.content.std,
            )
        )
