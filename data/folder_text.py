"""Any folder of text, as bytes, words or tokens."""

import codecs
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from data.file_sums import sums_of
from data.folder_files import files_below
from data.source import MOST_SHOWN, DatasetInfo, Source, Text, info_of, shortened
from data.text import BYTES, FEWEST_WORDS, in_numbers, one_each, words_of_lines
from data.token_files import FEWEST, Part, Tokens, tokens_of

UNITS = ("bytes", "words", "tokens")
HELD_OUT = 10  # without files for the test, the last tenth of each file is
USUAL_ENDINGS = "txt,md,tokens,raw"
NO_ENDING, ANY_ENDING = "none", "all"
SPLIT_OF = {  # word in a name -> split
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "valid"),
    "test": "test",
}


@dataclass(frozen=True, kw_only=True)
class FolderText(Source):
    """The text files of a folder and the folders in it, in the order of their paths; hidden ones are left out.

    A word of a file's name, or of a folder's that it is in, tells its split: SPLIT_OF has the words. What is not a
    letter separates them: ``wiki.train.tokens``, ``train/01.txt``. Where there are files of ``train`` and others of
    ``valid``, or else of ``test``, these are what is learnt from and measured on, and other files are not used: the
    layout of WikiText-2 and -103. Otherwise the last tenth of each file is for the test. A file of ``valid`` or
    ``test`` is never learnt from, and none of ``train`` is left out.

    Args:
        unit: 'bytes', of which there are 256; 'words' between white space, with ``<eos>`` after every line; 'tokens',
            pairs of bytes that are learnt from the training part by the library ``tokenizers``.
        endings: of the names of the files that are read, between commas; 'none' are names without one, 'all' all.
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
    endings: str = USUAL_ENDINGS
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
        train, test, unused = self._splits(folder)
        names = tuple(str(path.relative_to(folder)) for path in unused)
        return replace(self._text(folder, train, test), unused=names)

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
        """Count bytes, words or tokens; note what is not used."""
        text = self.load(root, 0)
        return replace(info_of(text), notes=(f"does not use {shortened(text.unused)}",) if text.unused else ())

    def checksums(self, root: str | None) -> dict[str, str]:
        """Return the checksums of the files."""
        folder = _folder(root)
        train, test, _ = self._splits(folder)
        return sums_of(folder, dict.fromkeys([*train, *test]))

    def _suffixes(self) -> list[str]:
        endings = [ending.strip().lstrip(".").lower() for ending in self.endings.split(",")]
        return ["" if ending == NO_ENDING else f".{ending}" for ending in endings if ending]

    def _splits(self, folder: Path) -> tuple[list[Path], list[Path], list[Path]]:
        """Return the training files, the test files (the same list if names do not tell), and the others.

        Raises:
            ValueError: the model would learn from test files, or a file of a split would not be read.
        """
        paths, unread = self._paths(folder)
        read, left = _by_split(folder, paths), _by_split(folder, unread)
        test = read.get("valid") or read.get("test") or []
        missed = [*left.get("train", []), *([] if test else left.get("valid", []) + left.get("test", []))]
        if missed:
            remedy = f"set endings to {_endings_of([*paths, *missed])}"
            if not any(map(_is_text, missed)):
                remedy = "they are no text in UTF-8, unpack or convert them"
            raise ValueError(
                f"{folder} holds {_names(folder, missed)}, by name of train, valid or test, which endings="
                f"{self.endings} leaves out: {remedy}, or move them away"
            )
        if test and "train" not in read:
            raise ValueError(
                f"{folder} holds {_names(folder, test)}, by name for the test, and no file of train: give what is to "
                "be learnt from a name with the word train, or these a name without valid and test"
            )
        self._check_the_larger_part_is_read(folder, paths, unread)
        train = read["train"] if test else paths
        used = {*train, *test}
        return train, test or paths, [path for path in [*paths, *unread] if path not in used]

    def _check_the_larger_part_is_read(self, folder: Path, paths: list[Path], unread: list[Path]) -> None:
        """Raise ValueError if the usual endings skip more text than they read: they may have found only a README."""
        if self.endings != USUAL_ENDINGS or _size(unread) <= _size(paths):
            return
        others = [path for path in unread if _is_text(path)]
        if _size(others) > _size(paths):
            raise ValueError(
                f"{folder} holds {_names(folder, others)}, more text than {_names(folder, paths)}, which endings="
                f"{self.endings} leaves out: set endings to what is to be read, {_endings_of(others)} or "
                f"{_endings_of(paths)}"
            )

    def _paths(self, folder: Path) -> tuple[list[Path], list[Path]]:
        """Return the files that are read, and the others, without empty ones."""
        try:
            paths = [path for path in sorted(files_below(folder)) if path.stat().st_size]
        except OSError as error:
            raise ValueError(f"{error.filename} cannot be read ({error.strerror}): it is part of the text") from error
        endings = self._suffixes()
        read = [path for path in paths if path.suffix.lower() in endings or f".{ANY_ENDING}" in endings]
        unread = [path for path in paths if path not in set(read)]
        if not read:
            there = f", it holds {_names(folder, unread)}" if unread else ""
            remedy = f"set endings to {_endings_of(unread)}" if unread else "name the folder that holds the text"
            raise ValueError(f"{folder} has no file of text that endings={self.endings} takes in{there}: {remedy}")
        return read, unread


def _by_split(folder: Path, paths: list[Path]) -> dict[str | None, list[Path]]:
    found: dict[str | None, list[Path]] = {}
    for path in paths:
        found.setdefault(_split_of(path.relative_to(folder)), []).append(path)
    return found


def _names(folder: Path, paths: list[Path]) -> str:
    return shortened([str(path.relative_to(folder)) for path in paths])


def _size(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _endings_of(paths: list[Path]) -> str:
    """Return the setting that reads these files."""
    endings = dict.fromkeys(path.suffix.lower().lstrip(".") or NO_ENDING for path in paths)
    return ",".join(endings) if len(endings) <= MOST_SHOWN else ANY_ENDING


def _is_text(path: Path) -> bool:
    """Return whether a file begins with text in UTF-8."""
    try:
        with path.open("rb") as file:
            return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(file.read(4096))  # may cut a letter
    except (OSError, UnicodeDecodeError):
        return False


def _split_of(path: Path) -> str | None:
    """Return the split that a file's name, or its folders' names, tell. Raises ValueError if they tell two."""
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
    """Return the parts of both splits' files; if the files are the same, the last tenth of each is the test part."""
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
    """Return where the last tenth of a file's lines begins, or of its letters if it has fewer than ten lines."""
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
