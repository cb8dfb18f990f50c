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
from data.source import Classification, DatasetInfo

SHAPE = (3, 32, 32)
ROW = 3 * 32 * 32  # bytes of one image: all red, then green, then blue


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The files of one of the two data sets.

    Attributes:
        name: of the data set, here.
        title: of the data set, in its authors' spelling.
        folder: that the authors' archive unpacks to.
        labels: key of the labels in a batch.
        num_classes: number of classes.
        mean, std: per channel over the 50,000 training images, in units of pixel / 255.
        train_md5, test_md5: the files and their MD5 sums in the authors' archive.
    """

    name: str
    title: str
    folder: str
    labels: str
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train_md5: dict[str, str]
    test_md5: dict[str, str]


# The MD5 sums are those of torchvision/datasets/cifar.py.
CIFAR10 = Layout(
    name="cifar10",
    title="CIFAR-10",
    folder="cifar-10-batches-py",
    labels="labels",
    num_classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    train_md5={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    test_md5={"test_batch": "40351d587109b95175f43aff81a1287e"},
)
CIFAR100 = Layout(
    name="cifar100",
    title="CIFAR-100",
    folder="cifar-100-python",
    labels="fine_labels",
    num_classes=100,
    # As in wide use, from weiaicunzai/pytorch-cifar100, conf/global_settings.py; rounded to four digits.
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    train_md5={"train": "16019d7e3df5f24257cddd939b257f8d"},
    test_md5={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cifar10:
    """50,000 training and 10,000 test images of 3x32x32 pixels in 10 classes, as uint8.

    Args:
        num_train, num_test: take only so many, the first of the files; None takes all. For studies at small scale.

    Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, technical report, University of Toronto,
    2009. torchvision is not used: it refuses a copy whose MD5 sums are not those of the official archive, and its
    unpickling can run code of a file. Here the checksums record whether the sums are the official ones.
    """

    LAYOUT: ClassVar[Layout] = CIFAR10

    num_train: int | None = None
    num_test: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_train", "num_test"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} of {self.LAYOUT.name} must be a whole number of at least 1, got {value}")

    def load(self, root: str | None, seed: int) -> Classification:
        """Read all batches, about 180 MB; the seed does not matter."""
        layout, folder = self.LAYOUT, self._folder(root)
        checksums: dict[str, str] = {}
        train_inputs, train_targets = _read_all(layout, folder, layout.train_md5, checksums)
        test_inputs, test_targets = _read_all(layout, folder, layout.test_md5, checksums)
        return Classification(
            train_inputs=train_inputs[: self.num_train],
            train_targets=train_targets[: self.num_train],
            test_inputs=test_inputs[: self.num_test],
            test_targets=test_targets[: self.num_test],
            num_classes=layout.num_classes,
            in_channels=SHAPE[0],
            checksums=checksums,
            mean=layout.mean,
            std=layout.std,
        )

    def check(self, root: str | None) -> None:
        """Read each batch once and drop it; raise ValueError for the first that is missing or wrong."""
        self.info(root)

    def info(self, root: str | None) -> DatasetInfo:
        """Count the images in the files, which takes a fraction of a second once they are cached."""
        layout, folder = self.LAYOUT, self._folder(root)
        return DatasetInfo(
            kind="images",
            sizes={"in_channels": SHAPE[0], "num_classes": layout.num_classes, "image_size": SHAPE[1]},
            num_train=_at_most(_count(layout, folder, layout.train_md5), self.num_train),
            num_test=_at_most(_count(layout, folder, layout.test_md5), self.num_test),
        )

    def checksums(self, root: str | None) -> dict[str, str]:
        """Return the checksums of the batches."""
        folder = self._folder(root)
        return sums_of(folder.parent, [folder / name for name in self.LAYOUT.train_md5 | self.LAYOUT.test_md5])

    def _folder(self, root: str | None) -> Path:
        name, wanted = self.LAYOUT.name, self.LAYOUT.folder
        if root is None:
            raise ValueError(f"dataset {name} needs a data root, got None: name the folder that holds {wanted}")
        folder = Path(root).expanduser() / wanted
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder: run python -m data.prepare {name} --root {folder.parent}")
        return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Cifar100(Cifar10):
    """50,000 training and 10,000 test images of 3x32x32 pixels in 100 classes, the fine labels, as uint8.

    Settings and source are those of `Cifar10`.
    """

    LAYOUT: ClassVar[Layout] = CIFAR100


def _at_most(there: int, wanted: int | None) -> int:
    return there if wanted is None else min(there, wanted)


def _count(layout: Layout, folder: Path, names: dict[str, str]) -> int:
    return sum(len(_decode(layout, folder / name, _content(layout, folder / name))[1]) for name in names)


def _read_all(layout: Layout, folder: Path, md5s: dict[str, str], checksums: dict[str, str]) -> tuple[Tensor, Tensor]:
    """Return (num, 3, 32, 32) uint8 images and (num,) int64 targets; enter each file into checksums."""
    inputs, targets = [], []
    for name, official in md5s.items():
        content = _content(layout, folder / name)
        rows, labels = _decode(layout, folder / name, content)
        inputs.append(torch.from_numpy(rows).view(-1, *SHAPE))
        targets.append(torch.from_numpy(labels))
        checksums[f"{layout.folder}/{name}"] = hashlib.sha256(content).hexdigest()
        same = hashlib.md5(content, usedforsecurity=False).hexdigest() == official
        checksums[f"{layout.folder}/{name}/official_md5"] = "equal" if same else "different"
    return torch.cat(inputs), torch.cat(targets)


def _content(layout: Layout, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): {_remedy(layout, path)}") from error


def _decode(layout: Layout, path: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return (num, 3072) uint8 rows and (num,) int64 labels of one batch."""
    try:
        return _batch(layout, pickles.loads(content))
    except ValueError as error:
        raise ValueError(f"{path} is not a {layout.title} batch ({error}): {_remedy(layout, path)}") from error


def _batch(layout: Layout, entry: object) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(entry, dict):
        raise ValueError(f"it holds a {type(entry).__name__}, not a dict")
    # Readers and writers disagree on whether the keys are str or bytes.
    values = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in entry.items()}
    missing = [key for key in ("data", layout.labels) if key not in values]
    if missing:
        raise ValueError(f"no '{missing[0]}' in it")
    rows = _rows(values["data"])
    return rows, _labels(values[layout.labels], len(rows), layout.num_classes)


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


def _remedy(layout: Layout, path: Path) -> str:
    return f"remove {path.parent} and run python -m data.prepare {layout.name} --root {path.parent.parent}"
