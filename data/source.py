"""The contents of a data set, and what data sets and batches have in common."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, cast

from torch import Tensor

from data.character_vocabulary import characters_of_words

MOST_SHOWN = 5  # most names in a message
MOST_DRAWN = 2**32  # most numbers of a generated data set: 16 GiB


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
        checksums: what was read -> its sha256, for the record of a run; it may hold remarks as well.
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
class Text:
    """A text as a stream of words, each a number.

    Attributes:
        train: (num_train,) int64 words in [0, num_words), in the order of the text; uint8 where they are bytes, int32
            where they are tokens.
        test: (num_test,) of the same vocabulary and type.
        words: the vocabulary; word i is ``words[i]``.
        checksums: what was read -> its sha256.
        num_bytes: (num_words,) int64 bytes of each word; None where the words are not all of the text.
        unused: files that lie beside the text and are not part of it.
    """

    train: Tensor
    test: Tensor
    words: tuple[str, ...]
    checksums: dict[str, str]
    num_bytes: Tensor | None = None
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Interactions:
    """The items that each user took, with one item of each user held out.

    Attributes:
        users, items: (num_train,) int32, the positive pairs to learn from, sorted by user and then by item.
        num_users, num_items: both are numbered from 0.
        test_items: (num_users,) int32, each user's held-out item; -1 where a user has too few to hold one out.
        test_negatives: (num_users, num_negatives) int32, items that the user never took; the held-out item is
            ranked against them. The same in every run.
        checksums: what was read -> its sha256.
    """

    users: Tensor
    items: Tensor
    num_users: int
    num_items: int
    test_items: Tensor
    test_negatives: Tensor
    checksums: dict[str, str]


Content = Classification | Text | Interactions
Kind = Literal["images", "text", "interactions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """The sizes that a model and a schedule need before the data is read.

    Attributes:
        kind: what a sample is.
        sizes: what a model is built from. images: in_channels, num_classes, image_size (pixels of a side); text:
            num_words, num_characters, word_length (most characters of a word); interactions: num_users, num_items.
        num_train: images, words of the training text, or positive pairs.
        num_test: images, words of the test text, or users with a held-out item.
        notes: what its user must know, each to be read after the name of the data set.
    """

    kind: Kind
    sizes: dict[str, int]
    num_train: int
    num_test: int
    notes: tuple[str, ...] = ()


class Source:
    """A data set that can be read: a frozen dataclass whose fields are its settings, checked by their types.

    Attributes:
        NAME: of the data set.
        LEAST: setting -> its smallest value; that of other whole numbers is 1.
    """

    NAME: ClassVar[str]
    LEAST: ClassVar[dict[str, int]] = {}

    def __post_init__(self) -> None:
        for field in fields(cast(Any, self)):
            value, least = getattr(self, field.name), self.LEAST.get(field.name, 1)
            if field.type == int | None and value is None:
                continue
            if field.type in (int, int | None):
                is_right = type(value) is int and least <= value < 2**63
                wanted = f"a whole number of at least {least}, below 2^63"
            elif field.type is float:
                is_right = type(value) in (int, float) and 0 <= value < math.inf
                wanted = "a finite number of at least 0"
            elif field.type is bool:
                is_right, wanted = isinstance(value, bool), "true or false"
            else:
                continue
            if not is_right:
                raise ValueError(f"{field.name} of {self.NAME} must be {wanted}, got {value!r}")

    def load(self, root: str | None, seed: int) -> Content:
        """Read everything; raise ValueError in one line when a file is missing or wrong."""
        raise NotImplementedError

    def check(self, root: str | None) -> None:
        """Raise what `load` would raise, without keeping anything."""
        self.info(root)

    def info(self, root: str | None) -> DatasetInfo:
        """Return the sizes."""
        return info_of(self.load(root, 0))

    def checksums(self, root: str | None) -> dict[str, str]:
        """Return the sha256 of each file that is read, computed once for large files; empty for generated data."""
        return {}


class Published(Source):
    """A data set in files that ``python -m data.prepare`` puts below the data root.

    Attributes:
        FOLDER: of the files.
        OPTIONS: that the command needs.
    """

    FOLDER: ClassVar[str]
    OPTIONS: ClassVar[str] = ""

    def folder(self, root: str | None) -> Path:
        """Return where the files are. Raises: ValueError."""
        if root is None:
            raise ValueError(
                f"dataset {self.NAME} needs a data root, got None: name the folder that holds {self.FOLDER}"
            )
        folder = Path(root).expanduser() / self.FOLDER
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder: {self.remedy(folder)}")
        return folder

    def remedy(self, folder: Path) -> str:
        """Return what a user should do to get the files."""
        return f"run python -m data.prepare {self.NAME}{self.OPTIONS} --root {folder.parent}"

    def wrong(self, path: Path, fault: str) -> ValueError:
        """Return the error of a file that is missing or wrong."""
        return ValueError(f"{path} {fault}: remove {path.parent} and {self.remedy(path.parent)}")

    def read(self, path: Path) -> bytes:
        """Return the content of a file. Raises: ValueError."""
        try:
            return path.read_bytes()
        except OSError as error:
            raise self.wrong(path, f"cannot be read ({error.strerror})") from error


class Batches(Protocol):
    """One rank's share of the training set: the interface for the training loop."""

    @property
    def num_batches(self) -> int:
        """Steps in an epoch, equal on all ranks."""

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Yield the batches of an epoch, the same for the same (seed, epoch, rank).

        Args:
            epoch: number of the epoch, from 0.
            start: number of batches to skip; the rest equal those of the whole epoch bit for bit.
        """


def info_of(content: Content) -> DatasetInfo:
    """Return the sizes of a data set that is loaded."""
    match content:
        case Classification():
            sizes = {"in_channels": content.in_channels, "num_classes": content.num_classes}
            sizes["image_size"] = content.test_inputs.shape[-1]
            num_train, num_test = len(content.train_inputs), len(content.test_inputs)
            return DatasetInfo(kind="images", sizes=sizes, num_train=num_train, num_test=num_test)
        case Text():
            letters = characters_of_words(content.words)
            sizes = {"num_words": len(content.words), "num_characters": int(letters.max()) + 1}
            sizes["word_length"] = letters.shape[1]
            return DatasetInfo(kind="text", sizes=sizes, num_train=len(content.train), num_test=len(content.test))
        case Interactions():
            sizes = {"num_users": content.num_users, "num_items": content.num_items}
            num_test = int((content.test_items >= 0).sum())
            return DatasetInfo(kind="interactions", sizes=sizes, num_train=len(content.users), num_test=num_test)


def check_drawn(settings: str, numel: int) -> None:
    """Raise ValueError if a generated data set would have more than MOST_DRAWN numbers."""
    if numel > MOST_DRAWN:
        given = f"{numel:.3g}" if numel < 1e18 else "more than 1e18"
        raise ValueError(f"{settings} describe {given} numbers, at most {MOST_DRAWN} are allowed: lower them")


def channel_stats(inputs: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of (num, channels, height, width) float32 images."""
    pixels = inputs.double().transpose(0, 1).flatten(1)
    return tuple(pixels.mean(dim=1).tolist()), tuple(pixels.std(dim=1, correction=0).tolist())


def shortened(names: Sequence[str]) -> str:
    """Return the first of many names, and the number of the others."""
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(names[:MOST_SHOWN]) + more


def sha256(values: Tensor) -> str:
    """Return the sha256 of a CPU tensor's bytes in row-major order."""
    return hashlib.sha256(values.contiguous().numpy().data).hexdigest()
