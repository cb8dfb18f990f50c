"""Handwritten digits that ship with scikit-learn: real images without a download."""

import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from data.seeding import generator
from data.source import Classification, Source, channel_stats, sha256

FILE = "datasets/data/digits.csv.gz"  # in scikit-learn's folder; a row is an image and its class
NUM_IMAGES = 1797
NUM_TEST = 360
MAX_PIXEL = 16  # a pixel counts the set bits of a 4x4 block
SPLIT_SEED = 1797  # not the run's seed: runs that differ in seed are measured on the same test images


@dataclass(frozen=True, kw_only=True)
class Digits(Source):
    """1,797 images of 8x8 pixels in 10 classes, scaled to [0, 1]; a fixed stratified split into 1,437 and 360.

    Source: Alpaydin & Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998; the
    copy inside scikit-learn is the original's test part.
    """

    NAME: ClassVar[str] = "digits"

    def load(self, root: str | None, seed: int) -> Classification:
        """Read the images; neither argument matters."""
        images, targets = _read()
        train, test = _split(targets)
        mean, std = channel_stats(images[train])
        return Classification(
            train_inputs=images[train],
            train_targets=targets[train],
            test_inputs=images[test],
            test_targets=targets[test],
            num_classes=10,
            in_channels=1,
            checksums={"digits/images": sha256(images), "digits/targets": sha256(targets)},
            mean=mean,
            std=std,
        )


def _read() -> tuple[Tensor, Tensor]:
    """Read scikit-learn's file without importing scikit-learn, which is slow."""
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ValueError("dataset digits needs scikit-learn: pip install scikit-learn")
    path = Path(package.submodule_search_locations[0]) / FILE
    try:
        rows = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.float32, ndmin=2))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"scikit-learn's {path} cannot be read ({error}): install scikit-learn again") from error
    if rows.shape != (NUM_IMAGES, 8 * 8 + 1):
        raise ValueError(
            f"scikit-learn's digits must be {NUM_IMAGES} rows of {8 * 8 + 1} numbers, got {tuple(rows.shape)}: "
            "install scikit-learn again"
        )
    return rows[:, :-1].div(MAX_PIXEL).reshape(-1, 1, 8, 8), rows[:, -1].long()


def _split(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return ascending (num_train,) and (num_test,) positions; both have every class in proportion."""
    shuffled = torch.randperm(NUM_IMAGES, generator=generator(SPLIT_SEED))
    by_class = shuffled[targets[shuffled].argsort(stable=True)]
    # Evenly spaced positions of a list sorted by class take from each class its share, to within one image.
    is_test = torch.zeros(NUM_IMAGES, dtype=torch.bool)
    is_test[by_class[torch.arange(NUM_TEST) * NUM_IMAGES // NUM_TEST]] = True
    return (~is_test).nonzero().squeeze(1), is_test.nonzero().squeeze(1)
