"""What a data set is, to the rest of the program."""

import hashlib
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """Labelled images in memory.

    Attributes:
        train_inputs: (num_train, in_channels, height, width); uint8 in 0..255, or float32.
        train_targets: (num_train,) int64 in [0, num_classes).
        test_inputs: (num_test, in_channels, height, width), of the same type as train_inputs.
        test_targets: (num_test,) int64.
        num_classes: number of classes.
        in_channels: channels of an image.
        checksums: what was read -> its sha256, for the record of a run; remarks on them beside.
        mean: per channel, of the training pixels; uint8 pixels count as pixel / 255.
        std: standard deviation, in the units of mean.
    """

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    num_classes: int
    in_channels: int
    checksums: dict[str, str]
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """The sizes that a model and a schedule need before the data is read; image_size in pixels, images are square."""

    num_classes: int
    in_channels: int
    num_train: int
    num_test: int
    image_size: int


class Source(Protocol):
    """A data set that can be read: a frozen dataclass whose fields are its settings."""

    def load(self, root: str | None, seed: int) -> Classification:
        """Read everything; raise ValueError in one line when a file is missing or wrong."""

    def check(self, root: str | None) -> None:
        """Raise what `load` would raise, without keeping anything."""

    def info(self, root: str | None) -> DatasetInfo:
        """Return the sizes."""


def channel_stats(inputs: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of (num, channels, height, width) float32 images."""
    pixels = inputs.double().transpose(0, 1).flatten(1)
    return tuple(pixels.mean(dim=1).tolist()), tuple(pixels.std(dim=1, correction=0).tolist())


def sha256(values: Tensor) -> str:
    """Return the sha256 of a CPU tensor's bytes in row-major order."""
    return hashlib.sha256(values.contiguous().numpy().data).hexdigest()
