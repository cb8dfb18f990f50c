"""ImageNet, or any folder of images in its layout, decoded once and read from memory-mapped files."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from data.augment import centre
from data.file_sums import sums_of
from data.source import Classification, Published

FOLDER = "imagenet"
SPLITS = ("train", "val")

# Per channel, in units of pixel / 255: those of torchvision's recipes (references/classification/presets.py).
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class ImageNet(Published):
    """About 1.28 million training and 50,000 validation photographs in 1,000 classes, as square uint8 images.

    The files are those of ``python -m data.prepare imagenet --from DIR``. Pixels are read when a batch needs them:
    the inputs are views of the files. They are read-only: writing to them ends the process.

    Args:
        image_size: side of the model's input images, in pixels. The test images are the centres of the stored ones;
            the training images are stored whole, and the augmentation cuts out of them.

    Source: Russakovsky et al., ImageNet Large Scale Visual Recognition Challenge, IJCV 2015, arXiv 1409.0575.
    Differences: images are stored decoded, shorter side resized and centre cropped to a square, so that random crops
    are cut out of that square and not out of the original photograph.
    """

    NAME: ClassVar[str] = "imagenet"
    FOLDER: ClassVar[str] = FOLDER
    OPTIONS: ClassVar[str] = " --from DIR"

    image_size: int = 224

    def load(self, root: str | None, seed: int) -> Classification:
        """Map the files; the seed does not matter."""
        folder = self.folder(root)
        classes = self._classes(folder)
        (train_inputs, train_targets), (test_inputs, test_targets) = (
            self._split(folder, split, len(classes)) for split in SPLITS
        )
        return Classification(
            train_inputs=train_inputs,
            train_targets=train_targets,
            test_inputs=centre(test_inputs, (self.image_size, self.image_size)),
            test_targets=test_targets,
            num_classes=len(classes),
            in_channels=3,
            checksums=self.checksums(root),
            mean=MEAN,
            std=STD,
        )

    def checksums(self, root: str | None) -> dict[str, str]:
        """Return the checksums of images, labels and classes; those of large files are from their preparation."""
        folder = self.folder(root)
        return sums_of(folder, files_in(folder), remedy=self.remedy(folder))

    def _split(self, folder: Path, split: str, num_classes: int) -> tuple[Tensor, Tensor]:
        """Return (num, 3, size, size) uint8 images, mapped, and (num,) int64 targets."""
        path = folder / f"{split}_images.npy"
        images, labels = self._array(path), np.array(self._array(folder / f"{split}_labels.npy"))
        is_right = images.dtype == np.uint8 and images.ndim == 4 and images.shape[1] == 3 and len(images)
        if not is_right or images.shape[2] != images.shape[3]:
            found = f"{images.dtype} of shape {images.shape}"
            raise self.wrong(path, f"must hold uint8 of shape (num, 3, size, size), got {found}")
        if images.shape[2] < self.image_size:
            raise ValueError(
                f"image_size of imagenet must be at most the {images.shape[2]} pixels that {path} was prepared with, "
                f"got {self.image_size}"
            )
        if labels.shape != images.shape[:1] or labels.min() < 0 or labels.max() >= num_classes:
            raise self.wrong(folder / f"{split}_labels.npy", f"does not fit {path} and classes.json")
        return _mapped(images), torch.from_numpy(labels.astype(np.int64))

    def _array(self, path: Path) -> np.ndarray:
        try:
            array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        except OSError as error:
            raise self.wrong(path, f"cannot be read ({error.strerror or error})") from error
        except (ValueError, EOFError) as error:
            raise self.wrong(path, f"is torn or no .npy file ({error})") from error
        return array

    def _classes(self, folder: Path) -> list[str]:
        path = folder / "classes.json"
        try:
            return [str(name) for name in json.loads(self.read(path))]
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
            raise self.wrong(path, f"must hold a list of class names ({error})") from error


def files_in(folder: Path) -> list[Path]:
    """Return all files that are read."""
    arrays = [f"{split}_{kind}.npy" for split in SPLITS for kind in ("images", "labels")]
    return [folder / name for name in ("classes.json", *arrays)]


def _mapped(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        # Torch warns because it cannot prevent writes to the array. A writable mapping would avoid the warning, but the
        # kernel would count its whole size as memory.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        return torch.from_numpy(array)
