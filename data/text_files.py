"""Texts in one file per split: WikiText-2 and the Penn Treebank."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from data.file_sums import sums_of
from data.source import Published, Text
from data.text import FEWEST_WORDS, SPECIAL, in_numbers, words_of_lines

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class _Files(Published):
    """Words between white space, one file per split, ``<eos>`` after every line."""

    FILES: ClassVar[tuple[str, ...]]  # names of a split's file; the first that exists is read
    LEAST: ClassVar[dict[str, int]] = {"max_words": FEWEST_WORDS}

    train: str = "train"
    test: str = "valid"
    lower: bool = False
    max_words: int | None = None
    num_train: int | None = None
    num_test: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for setting in ("train", "test"):
            if getattr(self, setting) not in SPLITS:
                allowed = ", ".join(SPLITS)
                raise ValueError(f"{setting} of {self.NAME} must be one of {allowed}, got {getattr(self, setting)!r}")
        if self.train == self.test:
            raise ValueError(f"train and test of {self.NAME} must be different splits, got {self.train!r} for both")

    def load(self, root: str | None, seed: int) -> Text:
        """Read both splits; the seed does not matter."""
        train, test = (self._words(path) for path in self._paths(root))
        return in_numbers(train[: self.num_train], test[: self.num_test], self.max_words, self.checksums(root))

    def checksums(self, root: str | None) -> dict[str, str]:
        """Return the checksums of both splits' files."""
        return sums_of(self.folder(root).parent, self._paths(root))

    def _paths(self, root: str | None) -> list[Path]:
        folder = self.folder(root)
        named = ([folder / name.format(split) for name in self.FILES] for split in (self.train, self.test))
        return [next((path for path in paths if path.exists()), paths[0]) for paths in named]

    def _words(self, path: Path) -> list[str]:
        try:
            text = self.read(path).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise self.wrong(path, f"is not text in UTF-8 (byte {error.start} is wrong)") from error
        words = words_of_lines(text.lower() if self.lower else text)
        if all(word in SPECIAL for word in words):
            raise self.wrong(path, "holds no words")
        return words


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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
