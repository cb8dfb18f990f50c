"""Any folder of text, as bytes, words or tokens."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.source import DatasetInfo, Text
from data.text import check_counts, in_numbers, sizes_of, words_of_lines
from data.text_bytes import BYTES, one_each
from data.token_files import FEWEST, FOLDER, Part, tokens_of

UNITS = ("bytes", "words", "tokens")
HELD_OUT = 10  # of files that are no splits, the last tenth of each is for the test
SPLITS = {"train": ("train",), "test": ("valid", "val", "test")}  # words in names of files; the first that is found


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderText:
    """The text files of a folder and the folders in it, in the order of their paths.

    Where names of files have ``train`` in them, and others ``valid`` (or ``val``, or ``test``), these are what is
    learnt from and measured on: the layout of WikiText-2 and -103. Otherwise the last tenth of each file is for the
    test.

    Args:
        unit: 'bytes', of which there are 256; 'words' between white space, with ``<eos>`` after every line; 'tokens',
            pairs of bytes that are learnt from the training part by the library ``tokenizers``.
        endings: of the names of the files that are read, between commas.
        max_words: keep only so many words, the most frequent; None keeps all. The number of tokens, at least 256, which
            must be given. Not for bytes.
        num_train, num_test: take only so many bytes, words or tokens, the first; None takes all.

    Tokens, and a single file of bytes for each split, are mapped into memory, not copied. Tokens are made once, in
    ``.tokens`` in the folder.

    Raises:
        ValueError: a setting is out of range.
    """

    unit: str = "bytes"
    endings: str = "txt,md,tokens,raw"
    max_words: int | None = None
    num_train: int | None = None
    num_test: int | None = None

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"unit of text must be one of {', '.join(UNITS)}, got {self.unit!r}")
        if not isinstance(self.endings, str) or not self._suffixes():
            raise ValueError(f"endings of text must be endings of names between commas, got {self.endings!r}")
        if self.unit == "bytes" and self.max_words is not None:
            raise ValueError(f"max_words of text is for words, got {self.max_words!r} for bytes: leave it out")
        if self.unit == "tokens" and (not isinstance(self.max_words, int) or self.max_words < FEWEST):
            raise ValueError(f"max_words of text must be at least {FEWEST} for tokens, got {self.max_words!r}")
        check_counts("text", self)

    def load(self, root: str | None, seed: int) -> Text:
        """Read the files; the seed does not matter."""
        folder = _folder(root)
        train, test = self._splits(folder)
        checksums = {str(path.relative_to(folder)): _digest(path) for path in dict.fromkeys([*train, *test])}
        if self.unit == "bytes":
            return self._cut(*_bytes(train, test), words=BYTES, num_bytes=one_each(), checksums=checksums)
        if self.unit == "tokens":
            assert self.max_words is not None
            found = tokens_of(folder, *_lines(train, test), self.max_words, checksums)
            return self._cut(found.train, found.test, words=found.words, num_bytes=found.num_bytes, checksums=checksums)
        words = _words(train, test)
        return in_numbers(words[0][: self.num_train], words[1][: self.num_test], self.max_words, checksums)

    def _cut(self, train: Tensor, test: Tensor, **about: Any) -> Text:
        return Text(train=train[: self.num_train], test=test[: self.num_test], **about)

    def check(self, root: str | None) -> None:
        """Read the files and drop them; raise ValueError for the first that is missing or wrong."""
        self.load(root, 0)

    def info(self, root: str | None) -> DatasetInfo:
        """Count bytes, words or tokens."""
        return sizes_of(self.load(root, 0))

    def _suffixes(self) -> tuple[str, ...]:
        return tuple(f".{ending.strip().lstrip('.')}" for ending in self.endings.split(",") if ending.strip(" ."))

    def _splits(self, folder: Path) -> tuple[list[Path], list[Path]]:
        """Return the files to learn from and to measure on; the same ones twice where names do not tell."""
        try:
            paths = sorted(p for p in folder.rglob("*") if p.suffix in self._suffixes() and p.is_file())
        except OSError as error:
            raise ValueError(f"{folder} cannot be read ({error.strerror}): name a folder of text") from error
        paths = [path for path in paths if path.stat().st_size and FOLDER not in path.parts]
        if not paths:
            raise ValueError(f"{folder} has no file of text that ends in {', '.join(self._suffixes())}: set endings")
        train = [path for path in paths if "train" in path.name.lower()]
        for word in SPLITS["test"] if train else ():
            found = [path for path in paths if word in path.name.lower() and path not in train]
            if found:
                return train, found
        return paths, paths


def _folder(root: str | None) -> Path:
    if root is None:
        raise ValueError("dataset text needs a root, got None: name the folder that holds the text")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: name the folder that holds the text")
    return folder


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): it is part of the text") from error


def _bytes(train: list[Path], test: list[Path]) -> tuple[Tensor, Tensor]:
    """Return the bytes (num,) uint8 of both splits."""
    if train is not test:
        return _joined([_mapped(path) for path in train]), _joined([_mapped(path) for path in test])
    files = [_mapped(path) for path in train]
    cuts = [len(content) - len(content) // HELD_OUT for content in files]
    parts = [(content[:cut], content[cut:]) for content, cut in zip(files, cuts, strict=True)]
    return _joined([part for part, _ in parts]), _joined([part for _, part in parts])


def _mapped(path: Path) -> Tensor:
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _lines(train: list[Path], test: list[Path]) -> tuple[list[Part], list[Part]]:
    """Return the lines of both splits."""
    if train is not test:
        return [Part(path=path) for path in train], [Part(path=path) for path in test]
    counts = [sum(1 for _ in path.open("rb")) for path in train]
    cuts = [num - num // HELD_OUT for num in counts]
    learnt = [Part(path=path, stop=cut) for path, cut in zip(train, cuts, strict=True)]
    return learnt, [Part(path=path, start=cut) for path, cut in zip(train, cuts, strict=True)]


def _words(train: list[Path], test: list[Path]) -> tuple[list[str], list[str]]:
    if train is not test:
        return [word for p in train for word in _read(p)], [word for p in test for word in _read(p)]
    learnt: list[str] = []
    measured: list[str] = []
    for path in train:
        words = _read(path)
        cut = len(words) - len(words) // HELD_OUT
        learnt += words[:cut]
        measured += words[cut:]
    return learnt, measured


def _read(path: Path) -> list[str]:
    try:
        return words_of_lines(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 (byte {error.start} is wrong): use unit=bytes") from error
