"""CIFAR-10 and CIFAR-100 in their official layout of pickled batches."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from data import pickles
from data.file_sums import sums_of
from data.source import Classification, DatasetInfo, Published

SHAPE = (3, 32, 32)
ROW = 3 * 32 * 32  # bytes of one image: all red, then green, then blue


@dataclass(frozen=True, kw_only=True)
class Cifar10(Published):
    """50,000 training and 10,000 test images of 3x32x32 pixels in 10 classes, as uint8.

    Args:
        num_train, num_test: take only so many, the first of the files; None takes all. For studies at small scale.

    Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, technical report, University of Toronto,
    2009. torchvision is not used: it refuses a copy whose MD5 sums are not those of the official archive, and its
    unpickling can run code of a file. Here the checksums record whether the sums are the official ones.

    Attributes:
        LABELS: key of the labels in a batch.
        MEAN, STD: per channel over the 50,000 training images, in units of pixel / 255.
        TRAIN_MD5, TEST_MD5: the files and their MD5 sums in the authors' archive, from torchvision/datasets/cifar.py.
    """

    NAME: ClassVar[str] = "cifar10"
    FOLDER: ClassVar[str] = "cifar-10-batches-py"
    LABELS: ClassVar[str] = "labels"
    NUM_CLASSES: ClassVar[int] = 10
    MEAN: ClassVar[tuple[float, ...]] = (0.4914, 0.4822, 0.4465)
    STD: ClassVar[tuple[float, ...]] = (0.2470, 0.2435, 0.2616)
    TRAIN_MD5: ClassVar[dict[str, str]] = {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    }
    TEST_MD5: ClassVar[dict[str, str]] = {"test_batch": "40351d587109b95175f43aff81a1287e"}

    num_train: int | None = None
    num_test: int | None = None

    def load(self, root: str | None, seed: int) -> Classification:
        """Read all batches, about 180 MB; the seed does not matter."""
        checksums: dict[str, str] = {}
        train_inputs, train_targets = self._read_all(root, self.TRAIN_MD5, checksums)
        test_inputs, test_targets = self._read_all(root, self.TEST_MD5, checksums)
        return Classification(
            train_inputs=train_inputs[: self.num_train],
            train_targets=train_targets[: self.num_train],
            test_inputs=test_inputs[: self.num_test],
            test_targets=test_targets[: self.num_test],
            num_classes=self.NUM_CLASSES,
            in_channels=SHAPE[0],
            checksums=checksums,
            mean=self.MEAN,
            std=self.STD,
        )

    def info(self, root: str | None) -> DatasetInfo:
        """Count the images in the files, which takes a fraction of a second once they are cached."""
        folder = self.folder(root)
        train, test = (
            sum(len(self._batch(folder / name)[1]) for name in names) for names in (self.TRAIN_MD5, self.TEST_MD5)
        )
        return DatasetInfo(
            kind="images",
            sizes={"in_channels": SHAPE[0], "num_classes": self.NUM_CLASSES, "image_size": SHAPE[1]},
            num_train=min(train, self.num_train or train),
            num_test=min(test, self.num_test or test),
        )

    def checksums(self, root: str | None) -> dict[str, str]:
        """Return the checksums of the batches."""
        folder = self.folder(root)
        return sums_of(folder.parent, [folder / name for name in self.TRAIN_MD5 | self.TEST_MD5])

    def _read_all(self, root: str | None, md5s: dict[str, str], checksums: dict[str, str]) -> tuple[Tensor, Tensor]:
        """Return (num, 3, 32, 32) uint8 images and (num,) int64 targets; enter each file into checksums."""
        folder, inputs, targets = self.folder(root), [], []
        for name, official in md5s.items():
            rows, labels, content = self._batch(folder / name)
            inputs.append(torch.from_numpy(rows).view(-1, *SHAPE))
            targets.append(torch.from_numpy(labels))
            checksums[f"{self.FOLDER}/{name}"] = hashlib.sha256(content).hexdigest()
            same = hashlib.md5(content, usedforsecurity=False).hexdigest() == official
            checksums[f"{self.FOLDER}/{name}/official_md5"] = "equal" if same else "different"
        return torch.cat(inputs), torch.cat(targets)

    def _batch(self, path: Path) -> tuple[np.ndarray, np.ndarray, bytes]:
        """Return (num, 3072) uint8 rows and (num,) int64 labels of one file, and its bytes."""
        content = self.read(path)
        try:
            values = _values(pickles.loads(content), self.LABELS)
            rows = _rows(values["data"])
            return rows, _labels(values[self.LABELS], len(rows), self.NUM_CLASSES), content
        except ValueError as error:
            raise self.wrong(path, f"is not a batch of {self.NAME} ({error})") from error


@dataclass(frozen=True, kw_only=True)
class Cifar100(Cifar10):
    """50,000 training and 10,000 test images of 3x32x32 pixels in 100 classes, the fine labels, as uint8.

    Settings and source are those of `Cifar10`. Mean and standard deviation are those in wide use, from
    weiaicunzai/pytorch-cifar100, conf/global_settings.py; rounded to four digits.
    """

    NAME: ClassVar[str] = "cifar100"
    FOLDER: ClassVar[str] = "cifar-100-python"
    LABELS: ClassVar[str] = "fine_labels"
    NUM_CLASSES: ClassVar[int] = 100
    MEAN: ClassVar[tuple[float, ...]] = (0.5071, 0.4865, 0.4409)
    STD: ClassVar[tuple[float, ...]] = (0.2673, 0.2564, 0.2762)
    TRAIN_MD5: ClassVar[dict[str, str]] = {"train": "16019d7e3df5f24257cddd939b257f8d"}
    TEST_MD5: ClassVar[dict[str, str]] = {"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"}


def _values(entry: object, labels: str) -> dict[Any, Any]:
    if not isinstance(entry, dict):
        raise ValueError(f"it holds a {type(entry).__name__}, not a dict")
    # Readers and writers disagree on whether the keys are str or bytes.
    values = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in entry.items()}
    for key in ("data", labels):
        if key not in values:
            raise ValueError(f"no '{key}' in it")
    return values


def _rows(given: Any) -> np.ndarray:
    right = isinstance(given, np.ndarray) and given.dtype == np.uint8 and given.ndim == 2
    if not right or given.shape[1] != ROW or len(given) == 0:
        raise ValueError(f"data must be uint8 of shape (num, {ROW}), num at least 1, got {_describe(given)}")
    return np.require(given, requirements=["C", "W"])


def _labels(given: object, num: int, num_classes: int) -> np.ndarray:
    labels = np.asarray(given)
    if labels.shape != (num,) or labels.dtype.kind not in "iu":
        raise ValueError(f"labels must be {num} integers, one per image, got {_describe(labels)}")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(f"labels must be in 0..{num_classes - 1}, got {labels.min()}..{labels.max()}")
    return labels.astype(np.int64)


def _describe(value: object) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
