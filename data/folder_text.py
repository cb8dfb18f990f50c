"""Any folder of text, as bytes, words or tokens."""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from data.checksums import RECORD
from data.file_sums import sums_of
from data.source import DatasetInfo, Source, Text, info_of, shortened
from data.text import BYTES, FEWEST_WORDS, in_numbers, one_each, words_of_lines
from data.token_files import FEWEST, Part, Tokens, tokens_of

UNITS = ("bytes", "words", "tokens")
HELD_OUT = 10  # of files that are no splits, the last tenth of each is for the test
SPLIT_OF = {"train": "train", "val": "valid", "valid": "valid", "validation": "valid", "test": "test"}  # word in a name


@dataclass(frozen=True, kw_only=True)
class FolderText(Source):
    """The text files of a folder and the folders in it, in the order of their paths; hidden ones are left out.

    A word of a file's name, or of a folder's that it is in, tells its split: ``train``, ``valid`` (or ``val``, or
    ``validation``) or ``test``. What is not a letter separates words: ``wiki.train.tokens``, ``train/01.txt``. Where
    there are files of ``train`` and others of ``valid``, or else of ``test``, these are what is learnt from and
    measured on, and other files are not used: the layout of WikiText-2 and -103. Otherwise the last tenth of each file
    is for the test.

    Args:
        unit: 'bytes', of which there are 256; 'words' between white space, with ``<eos>`` after every line; 'tokens',
            pairs of bytes that are learnt from the training part by the library ``tokenizers``.
        endings: of the names of the files that are read, between commas.
        max_words: keep only so many words, the most frequent; None keeps all. The number of tokens, at least 256, which
            must be given. Not for bytes.
        num_train, num_test: take only so many bytes, words or tokens, the first; None takes all.

    A byte-order mark is no part of words and tokens. Tokens, and a single file of bytes for each split, are mapped into
    memory, not copied. Tokens are made once, in ``.tokens`` in the folder.

    Raises:
        ValueError: a setting is out of range.
    """

    NAME: ClassVar[str] = "text"
    LEAST: ClassVar[dict[str, int]] = {"max_words": FEWEST_WORDS}

    unit: str = "bytes"
    endings: str = "txt,md,tokens,raw"
    max_words: int | None = None
    num_train: int | None = None
    num_test: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit not in UNITS:
            raise ValueError(f"unit of text must be one of {', '.join(UNITS)}, got {self.unit!r}")
        if not isinstance(self.endings, str) or not self._suffixes():
            raise ValueError(f"endings of text must be endings of names between commas, got {self.endings!r}")
        if self.unit == "bytes" and self.max_words is not None:
            raise ValueError(f"max_words of text is for words, got {self.max_words!r} for bytes: leave it out")
        if self.unit == "tokens" and (self.max_words is None or self.max_words < FEWEST):
            raise ValueError(f"max_words of text must be at least {FEWEST} for tokens, got {self.max_words!r}")

    def load(self, root: str | None, seed: int) -> Text:
        """Read the files; the seed does not matter."""
        folder = _folder(root)
        paths, others = self._paths(folder)
        train, test = _splits(folder, paths)
        used = {*train, *test}
        unused = (str(path.relative_to(folder)) for path in [*paths, *others] if path not in used)
        return replace(self._text(folder, train, test), unused=tuple(unused))

    def _text(self, folder: Path, train: list[Path], test: list[Path]) -> Text:
        checksums = sums_of(folder, dict.fromkeys([*train, *test]))
        if self.unit == "words":
            learnt, measured = ([word for part in parts for word in part] for parts in _cut(train, test, _words))
            return in_numbers(learnt[: self.num_train], measured[: self.num_test], self.max_words, checksums)
        if self.unit == "bytes":
            of_train, of_test = (_joined(parts) for parts in _cut(train, test, _mapped))
            found = Tokens(train=of_train, test=of_test, words=BYTES, num_bytes=one_each())
        else:
            assert self.max_words is not None
            found = tokens_of(folder, *_parts(train, test), self.max_words, checksums)
        return Text(
            train=found.train[: self.num_train],
            test=found.test[: self.num_test],
            words=found.words,
            num_bytes=found.num_bytes,
            checksums=checksums,
        )

    def info(self, root: str | None) -> DatasetInfo:
        """Count bytes, words or tokens; note what is not used, and test files that are learnt from."""
        text = self.load(root, 0)
        splits = {_split_of(Path(name)) for name in text.checksums} - {None}
        notes = [f"does not use {shortened(text.unused)}"] if text.unused else []
        if splits and "train" not in splits:
            notes.append(
                "has files of valid or test, none of train: all but the last tenth of each file is learnt from"
            )
        return replace(info_of(text), notes=tuple(notes))

    def checksums(self, root: str | None) -> dict[str, str]:
        """Return the checksums of the files."""
        folder = _folder(root)
        train, test = _splits(folder, self._paths(folder)[0])
        return sums_of(folder, dict.fromkeys([*train, *test]))

    def _suffixes(self) -> tuple[str, ...]:
        return tuple(
            f".{ending.strip().lstrip('.').lower()}" for ending in self.endings.split(",") if ending.strip(" .")
        )

    def _paths(self, folder: Path) -> tuple[list[Path], list[Path]]:
        """Return the files of text, and the others; empty ones are neither."""
        try:
            paths = [path for path in sorted(_files(folder)) if path.stat().st_size]
        except OSError as error:
            raise ValueError(f"{error.filename} cannot be read ({error.strerror}): it is part of the text") from error
        endings = self._suffixes()
        of_text = [path for path in paths if path.suffix.lower() in endings]
        if not of_text:
            raise ValueError(f"{folder} has no file of text that ends in {', '.join(endings)}: set endings")
        return of_text, [path for path in paths if path.suffix.lower() not in endings]


def _files(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yield the files of a folder and of the folders in it, linked ones as well. Raises: OSError."""
    above |= {folder.resolve()}
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name == RECORD:
            continue
        if not path.is_dir():
            yield path
        elif path.resolve() not in above:  # a link may lead back
            yield from _files(path, above)


def _splits(folder: Path, paths: list[Path]) -> tuple[list[Path], list[Path]]:
    """Return the files to learn from and to measure on; the same ones twice where names do not tell."""
    by_split: dict[str | None, list[Path]] = {}
    for path in paths:
        by_split.setdefault(_split_of(path.relative_to(folder)), []).append(path)
    test = by_split.get("valid") or by_split.get("test")
    return (by_split["train"], test) if test and "train" in by_split else (paths, paths)


def _split_of(path: Path) -> str | None:
    """Return the split that the name of a file, or of a folder that it is in, tells. Raises ValueError for two."""
    words = [re.split(r"[\W\d_]+", name.lower()) for name in (path.stem, *path.parent.parts)]
    named = [{SPLIT_OF[word] for word in of_name if word in SPLIT_OF} for of_name in words]
    splits = sorted({split for in_name in named if len(in_name) == 1 for split in in_name})
    if len(splits) > 1:
        raise ValueError(f"{path} is of {' and of '.join(splits)}, by its name and by its folders: rename one of them")
    return splits[0] if splits else None


def _folder(root: str | None) -> Path:
    if root is None:
        raise ValueError("dataset text needs a root, got None: name the folder that holds the text")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: name the folder that holds the text")
    return folder


def _cut(train: list[Path], test: list[Path], read: Callable[[Path], Any]) -> tuple[list[Any], list[Any]]:
    """Return what is read of the files of both splits, the last tenth of each where they are the same files."""
    if train is not test:
        return [read(path) for path in train], [read(path) for path in test]
    files = [read(path) for path in train]
    cuts = [len(content) - len(content) // HELD_OUT for content in files]
    parts = [(content[:cut], content[cut:]) for content, cut in zip(files, cuts, strict=True)]
    return [part for part, _ in parts], [part for _, part in parts]


def _mapped(path: Path) -> Tensor:
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _parts(train: list[Path], test: list[Path]) -> tuple[list[Part], list[Part]]:
    """Return both splits."""
    if train is not test:
        return [Part(path=path) for path in train], [Part(path=path) for path in test]
    cuts = [_last_tenth(path) for path in train]
    learnt = [Part(path=path, stop=cut) for path, cut in zip(train, cuts, strict=True)]
    return learnt, [Part(path=path, start=cut) for path, cut in zip(train, cuts, strict=True)]


def _last_tenth(path: Path) -> int:
    """Return where the last tenth of a file's lines begins; of its letters, where there are fewer than ten lines."""
    with path.open("rb") as file:
        size, num = path.stat().st_size, sum(1 for _ in file)
        file.seek(0)
        if num >= HELD_OUT:
            return sum(map(len, itertools.islice(file, num - num // HELD_OUT)))
        place = file.seek(size - size // HELD_OUT)
        return place + next((skipped for skipped, byte in enumerate(file.read(4)) if byte & 0xC0 != 0x80), 0)


def _words(path: Path) -> list[str]:
    try:
        return words_of_lines(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 (byte {error.start} is wrong): use unit=bytes") from error
