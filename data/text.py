"""Texts in numbers: vocabularies of words, and that of bytes."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from data.source import Text

# Every vocabulary of words begins with these two.
SPECIAL = ("<unk>", "<eos>")
UNKNOWN = 0  # replaces words outside the vocabulary; masked language modelling also uses it as the mask
END = 1  # follows every line, or every paragraph where lines are wrapped
FEWEST_WORDS = len(SPECIAL) + 1

BYTES = tuple(chr(byte) if 32 < byte < 127 else f"<{byte:02x}>" for byte in range(256))


def one_each() -> Tensor:
    """Return the length (256,) int64 of each word of the vocabulary of bytes: one byte."""
    return torch.ones(len(BYTES), dtype=torch.int64)


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


def words_of_lines(text: str) -> list[str]:
    """Return the words of a text, with ``<eos>`` at the end of each line, blank ones as well."""
    ended = text.removesuffix("\n") + "\n"
    return ended.replace("\n", f" {SPECIAL[END]} ").split()
