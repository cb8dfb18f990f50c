"""The characters of words as numbers, for models that read characters."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

PADDING, START, END = 0, 1, 2  # no characters; the text's characters follow, in the order of their code points
FIRST = 3

MAX_LENGTH = 65  # most numbers of a word, start and end included; a longer word loses its last characters


def characters_of_words(words: Sequence[str]) -> Tensor:
    """Return the characters of every word as numbers, padded to the longest word.

    A row holds the start mark, the word's characters, the end mark, and padding up to word_length. A word of more than
    ``MAX_LENGTH - 2`` characters keeps its first ones.

    Args:
        words: the vocabulary, at least one word, none empty.
    Returns:
        (num_words, word_length) int64 in [0, num_characters), on the CPU: word_length is at most ``MAX_LENGTH``, and
        num_characters one more than the largest number.

    Source: Kim, Jernite, Sontag & Rush, Character-Aware Neural Language Models, AAAI 2016, arXiv 1508.06615.
    Differences: ``<unk>`` and ``<eos>`` are spelled like other words, where the authors' code gives each a character of
    its own.
    """
    cut = np.array([word[: MAX_LENGTH - 2] for word in words])
    lengths = np.char.str_len(cut)
    codes = np.ascontiguousarray(cut).view(np.uint32).reshape(len(words), lengths.max())
    characters = np.unique(codes[codes > 0])  # numpy fills the rest of a row with 0
    letters = np.full((len(words), lengths.max() + 2), PADDING, dtype=np.int64)
    letters[:, 0] = START
    letters[:, 1:-1] = np.where(codes > 0, np.searchsorted(characters, codes) + FIRST, PADDING)
    letters[np.arange(len(words)), lengths + 1] = END
    return torch.from_numpy(letters)
