"""Python's help texts, by words or by bytes: a text to learn a language from without a download."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from data.source import Source, Text
from data.text import BYTES, END, FEWEST_WORDS, SPECIAL, in_numbers, one_each

WORD = re.compile(r"\w+|[^\w\s]")
RULE = re.compile(r"^([^\w\s])\1+$", re.MULTILINE)  # the line under a heading
BLANK = re.compile(r"\n\s*\n")
HELD_OUT = 10  # every tenth paragraph is in the test part


@dataclass(frozen=True, kw_only=True)
class Manuals(Source):
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

    NAME: ClassVar[str] = "manuals"
    LEAST: ClassVar[dict[str, int]] = {"max_words": FEWEST_WORDS}

    max_words: int | None = 2000
    num_train: int | None = None
    num_test: int | None = None

    def load(self, root: str | None, seed: int) -> Text:
        """Read the topics; neither argument matters."""
        topics = _topics()
        paragraphs = list(dict.fromkeys(_paragraphs(topics)))
        test = [word for paragraph in paragraphs[HELD_OUT - 1 :: HELD_OUT] for word in paragraph]
        del paragraphs[HELD_OUT - 1 :: HELD_OUT]
        train = [word for paragraph in paragraphs for word in paragraph]
        return in_numbers(train[: self.num_train], test[: self.num_test], self.max_words, self.checksums(root))

    def checksums(self, root: str | None) -> dict[str, str]:
        """Return the checksum of the topics."""
        topics = _topics()
        content = "".join(f"{name}\n{topics[name]}\n" for name in sorted(topics))
        return {"pydoc_data.topics": hashlib.sha256(content.encode()).hexdigest()}


@dataclass(frozen=True, kw_only=True)
class ManualsBytes(Source):
    """The topics of Python's ``help()`` as bytes of UTF-8, in the order of their names.

    A paragraph that several topics share is taken once, so that training and test share none; every tenth is for the
    test. The text and its checksum differ from one Python version to the next: compare runs of one version.

    Args:
        num_train, num_test: take only so many bytes; None takes all.

    Raises:
        ValueError: a setting is out of range.

    Source: pydoc_data.topics of Python's standard library.
    """

    NAME: ClassVar[str] = "manuals_bytes"

    num_train: int | None = None
    num_test: int | None = None

    def load(self, root: str | None, seed: int) -> Text:
        """Read the topics; neither argument matters."""
        topics = _topics()
        whole = [paragraph.strip("\n") for name in sorted(topics) for paragraph in BLANK.split(topics[name])]
        paragraphs = [f"{paragraph}\n\n".encode() for paragraph in dict.fromkeys(whole) if paragraph.strip()]
        test = paragraphs[HELD_OUT - 1 :: HELD_OUT]
        del paragraphs[HELD_OUT - 1 :: HELD_OUT]
        checksums = {"pydoc_data.topics": hashlib.sha256(b"".join(paragraphs + test)).hexdigest()}
        return Text(
            train=_bytes(paragraphs)[: self.num_train],
            test=_bytes(test)[: self.num_test],
            words=BYTES,
            checksums=checksums,
            num_bytes=one_each(),
        )

    def checksums(self, root: str | None) -> dict[str, str]:
        """Return the checksum of the topics."""
        return self.load(None, 0).checksums


def _bytes(paragraphs: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(paragraphs)), dtype=torch.uint8)


def _topics() -> dict[str, str]:
    """Return the texts of Python's ``help()`` by topic. Raises ValueError if this Python has none."""
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
