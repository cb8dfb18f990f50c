"""Texts as tokens of a vocabulary that is learnt from them, in files that are made once and mapped into memory.

The tokens are byte pairs (Sennrich, Haddow & Birch, ACL 2016, arXiv 1508.07909) over the 256 bytes, as GPT-2 has them:
every text can be written in them, and each is a known number of bytes. The library ``tokenizers`` learns and applies
them.
"""

import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

FOLDER = ".tokens"  # a folder in that of the text
VOCABULARY, SPLITS = "vocabulary.json", ("train", "test")
LINES = 4096  # lines per read
FORM = 2  # version of the files; raise it if the same text gives other tokens
FEWEST = 256  # least number of tokens: one per byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a file of text in UTF-8.

    Attributes:
        start, stop: the places of its first byte, and of the one after its last; None is the end.
    """

    path: Path
    start: int = 0
    stop: int | None = None

    def blocks(self) -> Iterator[str]:
        """Yield the text, some lines at a time, without a byte-order mark. Raises ValueError if it is not UTF-8."""
        place, stop = self.start, self.path.stat().st_size if self.stop is None else self.stop
        try:
            with self.path.open("rb") as file:
                file.seek(place)
                while place < stop and (block := b"".join(itertools.islice(file, LINES))[: stop - place]):
                    yield block.decode("utf-8" if place else "utf-8-sig")
                    place += len(block)
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path} is not text in UTF-8 ({error.reason}): use unit=bytes") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A text in tokens.

    Attributes:
        train, test: (num,) int32, or uint8 bytes.
        words: the tokens as text; bytes that are no character of their own have the letters that GPT-2 gives them.
        num_bytes: (num_words,) int64 of each token.
    """

    train: Tensor
    test: Tensor
    words: tuple[str, ...]
    num_bytes: Tensor


def tokens_of(
    folder: Path, train: Sequence[Part], test: Sequence[Part], num_words: int, checksums: dict[str, str]
) -> Tokens:
    """Return the text in ``num_words`` tokens learnt from its training part, or fewer if it is short.

    The files are in ``folder/.tokens``. They are made where they are not there, of this text, number of tokens and
    version of the library, and appear together.

    Args:
        checksums: of the text's files.

    Raises:
        ValueError: the library is missing, a file is not text, or the folder cannot be written.
    """
    library = _library()
    version = str(library.__version__)
    parts = [[[str(part.path.relative_to(folder)), part.start, part.stop] for part in split] for split in (train, test)]
    key = json.dumps([FORM, checksums, parts, num_words, version], sort_keys=True)
    place = folder / FOLDER / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not place.is_dir():
        _make(place, library, train, test, num_words)
    words: list[str] = json.loads((place / VOCABULARY).read_text(encoding="utf-8"))
    num_bytes = torch.tensor([len(word) for word in words])  # one letter per byte
    mapped = [_mapped(place / f"{split}.int32") for split in SPLITS]
    return Tokens(train=mapped[0], test=mapped[1], words=tuple(words), num_bytes=num_bytes)


def _library() -> ModuleType:
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError("unit=tokens of text needs the package tokenizers: install it, or use unit=bytes") from error
    return tokenizers


def _make(place: Path, library: ModuleType, train: Sequence[Part], test: Sequence[Part], num_words: int) -> None:
    try:
        place.parent.mkdir(exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=place.parent, prefix="making-"))
        try:
            coder = _learnt(library, train, num_words)
            words = sorted(coder.get_vocab().items(), key=lambda item: item[1])
            (work / VOCABULARY).write_text(json.dumps([word for word, _ in words]), encoding="utf-8")
            for split, parts in zip(SPLITS, (train, test), strict=True):
                _write(work / f"{split}.int32", coder, parts)
            if not place.is_dir():  # another process may have made it
                work.rename(place)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        if place.is_dir():  # another process made it just now
            return
        raise ValueError(
            f"{place.parent} cannot be written ({error.strerror}): copy the text to where it can"
        ) from error


def _learnt(library: ModuleType, parts: Sequence[Part], num_words: int) -> Any:
    """Return a coder with tokens learnt from the text; equal texts give equal tokens."""
    coder = library.Tokenizer(library.models.BPE())
    coder.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=num_words, initial_alphabet=alphabet, show_progress=False)
    coder.train_from_iterator((block for part in parts for block in part.blocks()), trainer)
    return coder


def _write(path: Path, coder: Any, parts: Sequence[Part]) -> None:
    with path.open("wb") as file:
        for part in parts:
            for block in part.blocks():
                file.write(np.asarray(coder.encode(block, add_special_tokens=False).ids, dtype=np.int32).tobytes())
        file.flush()
        os.fsync(file.fileno())


def _mapped(path: Path) -> Tensor:
    size = path.stat().st_size // torch.int32.itemsize
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.int32) if size else torch.empty(0).int()
