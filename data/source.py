"""The contents of a data set, and the protocols that data sets and batches implement."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

MOST_SHOWN = 5  # names, in a line
MOST_DRAWN = 2**32  # numbers of a data set that is drawn: 16 GiB


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


class Source(Protocol):
    """A data set that can be read: a frozen dataclass whose fields are its settings."""

    def load(self, root: str | None, seed: int) -> Content:
        """Read everything; raise ValueError in one line when a file is missing or wrong."""

    def check(self, root: str | None) -> None:
        """Raise what `load` would raise, without keeping anything."""

    def info(self, root: str | None) -> DatasetInfo:
        """Return the sizes."""

    def checksums(self, root: str | None) -> dict[str, str]:
        """Return what is read -> its sha256, large files once; nothing where the settings and the seed say it all."""


class Batches(Protocol):
    """One rank's share of the training set: what every kind of data gives the training loop."""

    @property
    def num_batches(self) -> int:
        """Steps in an epoch, equal on all ranks."""

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Yield the batches of an epoch, the same for the same (seed, epoch, rank).

        Args:
            epoch: number of the epoch, from 0.
            start: number of batches to skip; the rest equal those of the whole epoch bit for bit.
        """


def check_drawn(settings: str, numel: int) -> None:
    """Raise ValueError where a data set that is drawn would have more numbers than every worker can hold in memory."""
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
