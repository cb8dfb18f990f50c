"""Python's help texts, byte by byte: a text to learn a language from without a download."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from data.source import DatasetInfo, Text
from data.text import BLANK, HELD_OUT, check_counts, help_topics, sizes_of
from data.text_bytes import BYTES, one_each


@dataclass(frozen=True, slots=True, kw_only=True)
class ManualsBytes:
    """The topics of Python's ``help()`` as bytes of UTF-8, in the order of their names.

    A paragraph that several topics share is taken once, so that training and test share none; every tenth is for the
    test. The text and its checksum differ from one Python version to the next: compare runs of one version.

    Args:
        num_train, num_test: take only so many bytes; None takes all.

    Raises:
        ValueError: a setting is out of range.

    Source: pydoc_data.topics of Python's standard library.
    """

    num_train: int | None = None
    num_test: int | None = None

    def __post_init__(self) -> None:
        check_counts("manuals_bytes", self)

    def load(self, root: str | None, seed: int) -> Text:
        """Read the topics; neither argument matters."""
        topics = help_topics()
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

    def check(self, root: str | None) -> None:
        """Raise ValueError when this Python has no topics."""
        help_topics()

    def info(self, root: str | None) -> DatasetInfo:
        """Count the bytes."""
        return sizes_of(self.load(None, 0))

    def checksums(self, root: str | None) -> dict[str, str]:
        """Return the checksum of the topics."""
        return self.load(None, 0).checksums


def _bytes(paragraphs: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(paragraphs)), dtype=torch.uint8)
