"""Images drawn at random, for tests and benchmarks that need data of a given size."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from data.seeding import generator
from data.source import Classification, DatasetInfo, Source, channel_stats, check_drawn, sha256


@dataclass(frozen=True, kw_only=True)
class Synthetic(Source):
    """One Gaussian blob per class: a centre image, and samples of unit variance around it.

    Attributes:
        num_samples: training images; a fifth as many, at least one, are drawn for the test.
        image_size: side of the square images, in pixels.
        channels: channels of an image.
        num_classes: number of blobs. Samples take the classes in turn, so every count is equal to within one.

    Raises:
        ValueError: a setting is not an integer of at least 1, or the images need more memory than allowed.
    """

    NAME: ClassVar[str] = "synthetic"

    num_samples: int = 1024
    image_size: int = 8
    channels: int = 1
    num_classes: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        images = self.num_samples + max(1, self.num_samples // 5) + self.num_classes
        check_drawn("num_samples, num_classes, channels and image_size", images * self.channels * self.image_size**2)

    def load(self, root: str | None, seed: int) -> Classification:
        """Draw the images; equal seeds and settings give equal images."""
        sizes = self.info(None)
        random = generator(seed)
        centres = torch.randn(self.num_classes, self.channels, self.image_size, self.image_size, generator=random)
        train_inputs, train_targets = _draw(centres, sizes.num_train, random)
        test_inputs, test_targets = _draw(centres, sizes.num_test, random)
        mean, std = channel_stats(train_inputs)
        return Classification(
            train_inputs=train_inputs,
            train_targets=train_targets,
            test_inputs=test_inputs,
            test_targets=test_targets,
            num_classes=self.num_classes,
            in_channels=self.channels,
            checksums={"synthetic/train": sha256(train_inputs), "synthetic/test": sha256(test_inputs)},
            mean=mean,
            std=std,
        )

    def info(self, root: str | None) -> DatasetInfo:
        """Return the sizes, from the settings."""
        return DatasetInfo(
            kind="images",
            sizes={"in_channels": self.channels, "num_classes": self.num_classes, "image_size": self.image_size},
            num_train=self.num_samples,
            num_test=max(1, self.num_samples // 5),
        )


def _draw(centres: Tensor, num_samples: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (num_samples, channels, size, size) float32 images and their (num_samples,) int64 classes."""
    targets = torch.arange(num_samples) % len(centres)
    noise = torch.randn(num_samples, *centres.shape[1:], generator=random)
    return noise.add_(centres[targets]), targets
