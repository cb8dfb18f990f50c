"""Texts to learn a language from: WikiText-2, the Penn Treebank, and Python's own manual for runs without a file."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from data.character_vocabulary import characters_of_words
from data.file_sums import sums_of
from data.source import DatasetInfo, Text

SPLITS = ("train", "valid", "test")

# Every vocabulary begins with these two, so that their numbers are the same in all texts.
SPECIAL = ("<unk>", "<eos>")
UNKNOWN = 0  # replaces words outside the vocabulary; masked language modelling also uses it as the mask
END = 1  # follows every line, or every paragraph where lines are wrapped

WORD = re.compile(r"\w+|[^\w\s]")
RULE = re.compile(r"^([^\w\s])\1+$", re.MULTILINE)  # the line under a heading
BLANK = re.compile(r"\n\s*\n")
HELD_OUT = 10  # every tenth paragraph of the manual is for the test


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """Words between white space, one file per split, ``<eos>`` after every line."""

    NAME: ClassVar[str]
    FOLDER: ClassVar[str]
    FILES: ClassVar[tuple[str, ...]]  # names of a split's file, the first that exists is read

    train: str = "train"
    test: str = "valid"
    lower: bool = False
    max_words: int | None = None
    num_train: int | None = None
    num_test: int | None = None

    def __post_init__(self) -> None:
        for setting in ("train", "test"):
            if getattr(self, setting) not in SPLITS:
                allowed = ", ".join(SPLITS)
                raise ValueError(f"{setting} of {self.NAME} must be one of {allowed}, got {getattr(self, setting)!r}")
        if self.train == self.test:
            raise ValueError(f"train and test of {self.NAME} must be different splits, got {self.train!r} for both")
        if not isinstance(self.lower, bool):
            raise ValueError(f"lower of {self.NAME} must be true or false, got {self.lower!r}")
        check_counts(self.NAME, self)

    def load(self, root: str | None, seed: int) -> Text:
        """Read both splits; the seed does not matter."""
        folder = self._folder(root)
        checksums: dict[str, str] = {}
        train = self._read(folder, self.train, checksums)[: self.num_train]
        test = self._read(folder, self.test, checksums)[: self.num_test]
        return in_numbers(train, test, self.max_words, checksums)

    def check(self, root: str | None) -> None:
        """Read both splits and drop them; raise ValueError for the first that is missing or wrong."""
        self.load(root, 0)

    def info(self, root: str | None) -> DatasetInfo:
        """Count the words, which needs the files to be read once."""
        return sizes_of(self.load(root, 0))

    def checksums(self, root: str | None) -> dict[str, str]:
        """Return the checksums of both splits' files."""
        folder = self._folder(root)
        return sums_of(folder.parent, [self._path(folder, split) for split in (self.train, self.test)])

    def _folder(self, root: str | None) -> Path:
        if root is None:
            raise ValueError(
                f"dataset {self.NAME} needs a data root, got None: name the folder that holds {self.FOLDER}"
            )
        folder = Path(root).expanduser() / self.FOLDER
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder: {self._remedy()}")
        return folder

    def _read(self, folder: Path, split: str, checksums: dict[str, str]) -> list[str]:
        path = self._path(folder, split)
        try:
            content = path.read_bytes()
            text = content.decode("utf-8-sig")
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}): {self._remedy()}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text in UTF-8 (byte {error.start} is wrong): {self._remedy()}") from error
        words = words_of_lines(text.lower() if self.lower else text)
        if all(word in SPECIAL for word in words):
            raise ValueError(f"{path} holds no words: {self._remedy()}")
        checksums[f"{self.FOLDER}/{path.name}"] = hashlib.sha256(content).hexdigest()
        return words

    def _path(self, folder: Path, split: str) -> Path:
        paths = [folder / name.format(split) for name in self.FILES]
        return next((path for path in paths if path.exists()), paths[0])

    def _remedy(self) -> str:
        splits = "{" + ",".join(SPLITS) + "}"
        layout = " or ".join(name.format(splits) for name in self.FILES)
        return f"put {layout} into {self.FOLDER} under the data root, or run python -m data.prepare {self.NAME}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WikiText2(_Files):
    """Articles of Wikipedia, about two million words, with rare words already replaced by ``<unk>``.

    The vocabulary is that of the training text: 33,278 words with the official file. Other words of the test text
    become ``<unk>``.

    Args:
        train: which split to learn from: train, valid or test.
        test: which split to measure on. The default is valid because that is the split whose perplexity the authors
            of MiCRO report as their test.
        lower: convert the text to lower case.
        max_words: keep only so many words, the most frequent; None keeps all.
        num_train, num_test: take only so many words, the first of the files; None takes all. For studies at small
            scale: the vocabulary shrinks with num_train, so that perplexities compare only between equal settings.

    Raises:
        ValueError: a setting is out of range.

    Source: Merity, Xiong, Bradbury & Socher, Pointer Sentinel Mixture Models, ICLR 2017, arXiv 1609.07843.
    """

    NAME: ClassVar[str] = "wikitext2"
    FOLDER: ClassVar[str] = "wikitext-2"
    FILES: ClassVar[tuple[str, ...]] = ("wiki.{}.tokens", "{}.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ptb(_Files):
    """Articles of the Wall Street Journal, in the lower-cased version with numbers as ``N`` that language models use.

    The settings are those of `WikiText2`, save that the test split is the one called test.

    Raises:
        ValueError: a setting is out of range.

    Source: Marcus, Santorini & Marcinkiewicz, Building a Large Annotated Corpus of English: The Penn Treebank,
    Computational Linguistics 19(2), 1993; the version is that of Mikolov, Karafiat, Burget, Cernocky & Khudanpur,
    Recurrent Neural Network Based Language Model, Interspeech 2010.
    """

    NAME: ClassVar[str] = "ptb"
    FOLDER: ClassVar[str] = "ptb"
    FILES: ClassVar[tuple[str, ...]] = ("ptb.{}.txt", "{}.txt")

    test: str = "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manuals:
    """The topics of Python's ``help()``: English text without a download.

    Topics are in the order of their names and in lower case; a punctuation mark is a word; ``<eos>`` follows every
    paragraph. A paragraph that several topics share is taken once, so that training and test share none. Every tenth
    paragraph is for the test. The text and its checksum differ from one Python version to the next: compare runs of one
    version.

    Args:
        max_words: keep only so many words, the most frequent; None keeps all.
        num_train, num_test: take only so many words; None takes all.

    Raises:
        ValueError: a setting is out of range.

    Source: pydoc_data.topics of Python's standard library.
    """

    max_words: int | None = 2000
    num_train: int | None = None
    num_test: int | None = None

    def __post_init__(self) -> None:
        check_counts("manuals", self)

    def load(self, root: str | None, seed: int) -> Text:
        """Read the topics; neither argument matters."""
        topics = help_topics()
        paragraphs = list(dict.fromkeys(_paragraphs(topics)))
        test = [word for paragraph in paragraphs[HELD_OUT - 1 :: HELD_OUT] for word in paragraph]
        del paragraphs[HELD_OUT - 1 :: HELD_OUT]
        train = [word for paragraph in paragraphs for word in paragraph]
        return in_numbers(train[: self.num_train], test[: self.num_test], self.max_words, self.checksums(root))

    def check(self, root: str | None) -> None:
        """Raise ValueError when this Python has no topics."""
        help_topics()

    def info(self, root: str | None) -> DatasetInfo:
        """Count the words."""
        return sizes_of(self.load(None, 0))

    def checksums(self, root: str | None) -> dict[str, str]:
        """Return the checksum of the topics."""
        topics = help_topics()
        content = "".join(f"{name}\n{topics[name]}\n" for name in sorted(topics))
        return {"pydoc_data.topics": hashlib.sha256(content.encode()).hexdigest()}


def vocabulary(words: Sequence[str], max_words: int | None = None) -> tuple[str, ...]:
    """Return ``<unk>``, ``<eos>``, then the words, the most frequent first, equally frequent ones sorted.

    Args:
        words: the text to learn from.
        max_words: length of the result at most; None keeps all.
    """
    counts = Counter(words)
    for special in SPECIAL:
        counts.pop(special, None)
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    return (*SPECIAL, *ordered)[:max_words]


def in_numbers(train: Sequence[str], test: Sequence[str], max_words: int | None, checksums: dict[str, str]) -> Text:
    """Return the words of both parts by their numbers in the vocabulary of ``train``."""
    words = vocabulary(train, max_words)
    numbers = {word: number for number, word in enumerate(words)}
    return Text(train=_numbered(train, numbers), test=_numbered(test, numbers), words=words, checksums=checksums)


def _numbered(words: Sequence[str], numbers: Mapping[str, int]) -> Tensor:
    return torch.from_numpy(np.fromiter((numbers.get(word, UNKNOWN) for word in words), np.int64, len(words)))


def sizes_of(text: Text) -> DatasetInfo:
    """Return what a model and a run need to know of a text."""
    letters = characters_of_words(text.words)
    sizes = {
        "num_words": len(text.words),
        "num_characters": int(letters.max()) + 1,
        "word_length": letters.shape[1],
    }
    return DatasetInfo(kind="text", sizes=sizes, num_train=len(text.train), num_test=len(text.test))


def words_of_lines(text: str) -> list[str]:
    """Return the words of a text, with ``<eos>`` at the end of each line, blank ones as well."""
    ended = text.removesuffix("\n") + "\n"
    return ended.replace("\n", f" {SPECIAL[END]} ").split()


def help_topics() -> dict[str, str]:
    """Return the texts of Python's ``help()`` by topic. Raises ValueError where this Python has none."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            f"dataset manuals needs Python's help topics ({error}): install Python's pydoc_data"
        ) from error
    return topics


def _paragraphs(topics: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    for name in sorted(topics):
        for paragraph in BLANK.split(RULE.sub("", topics[name].lower())):
            words = WORD.findall(paragraph)
            if words:
                yield (*words, SPECIAL[END])


def check_counts(name: str, settings: Any) -> None:
    """Raise ValueError unless the settings that count something are None or large enough."""
    smallest = {"max_words": len(SPECIAL) + 1, "num_train": 1, "num_test": 1}
    for field in fields(settings):
        if field.name not in smallest:
            continue
        value, least = getattr(settings, field.name), smallest[field.name]
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ValueError(f"{field.name} of {name} must be a whole number of at least {least}, got {value!r}")
