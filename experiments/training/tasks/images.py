"""Classify images."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import data
from data.augment import AUGMENTATIONS
from experiments.config.errors import check_choice
from experiments.config.schema import TrainConfig
from experiments.training.tasks.base import Batch, Carry, Task, refuse_settings

EVAL_BATCH = 500
RESIDENT_BYTES = 2**30


class ImageTask(Task):
    """Predict the class of an image; measured by the accuracy."""

    def batches(self, rank: int) -> data.ShardedBatches:
        """Return a rank's shuffled and augmented images."""
        return data.ShardedBatches(
            self._on_device(self.content.train_inputs),
            self._on_device(self.content.train_targets),
            batch_size=self.config.batch_size,
            rank=rank,
            world_size=self.config.world_size,
            seed=self.config.seed,
            augment=self.config.dataset.augment,
            mean=self.content.mean,
            std=self.content.std,
            device=self.device,
            image_size=self.content.test_inputs.shape[-1],  # photographs are stored larger, to be cropped
        )

    def objective(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        """Return the cross entropy of a batch."""
        inputs, targets = batch
        return F.cross_entropy(model(self._in_memory_format(inputs)), targets), None

    def test_sums(self, rank: int, world_size: int) -> Tensor:
        """Return (3,) sums: loss, correct predictions, images."""
        sums = self.zeros(3)
        batches = data.EvalBatches(
            self._on_device(self.content.test_inputs),
            self._on_device(self.content.test_targets),
            batch_size=EVAL_BATCH,
            rank=rank,
            world_size=world_size,
            mean=self.content.mean,
            std=self.content.std,
            device=self.device,
        )
        for inputs, targets in batches:
            outputs = self.model(self._in_memory_format(inputs)).float()
            sums[0] += F.cross_entropy(outputs, targets, reduction="sum")
            sums[1] += (outputs.argmax(1) == targets).sum()
            sums[2] += len(targets)
        return sums

    @staticmethod
    def measures(sums: Tensor) -> dict[str, float]:
        """Return the mean loss and the accuracy."""
        loss, correct, num = sums.tolist()
        return {"test_loss": loss / num, "accuracy": correct / num}

    @staticmethod
    def check(config: TrainConfig) -> None:
        """Raise UserError for an augmentation that does not exist, or settings of other data."""
        check_choice("dataset.augment", AUGMENTATIONS, config.dataset.augment)
        refuse_settings(config, sequence_length=None, negatives=None)

    @staticmethod
    def num_batches(config: TrainConfig, num_train: int) -> int:
        """Return the number of full batches of each rank in an epoch."""
        return num_train // (config.world_size * config.batch_size)

    def _on_device(self, values: Tensor) -> Tensor:
        """Return values on the model's device if they are small enough; a larger set moves there batch by batch."""
        return values.to(self.device) if values.nbytes <= RESIDENT_BYTES else values

    def _in_memory_format(self, inputs: Tensor) -> Tensor:
        if not self.config.channels_last:
            return inputs
        return inputs.contiguous(memory_format=torch.channels_last)
