"""A patch, and its form in a file: what it says of itself in JSON, its body, and the SHA-256 of both."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

MAGIC = b"micro patch 1\n"
START, DIGEST_BYTES = len(MAGIC) + 8, 32  # of the JSON, whose length the eight bytes before it hold


class Change(NamedTuple):
    """What a patch holds of one tensor.

    Attributes:
        dtype: as torch names it, such as "bfloat16".
        pieces: of each piece of the tensor, how many elements changed and how many bytes their differences take; empty
            where none changed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Patch:
    """What makes one version of weights another. Build it with `diff`.

    Attributes:
        base, result: SHA-256 of the weights before and afterwards, as `digest` returns it.
        tensors: all tensors of the weights, also those that did not change.
        body: where elements changed, and by how much.
    """

    base: str
    result: str
    tensors: tuple[Change, ...]
    body: bytes

    @property
    def num_changed(self) -> int:
        """Elements that changed; the two parts of a complex one count separately."""
        return sum(count for tensor in self.tensors for count, _ in tensor.pieces)

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of the file, which are also those that are sent."""
        return len(_head(self)) + len(self.body) + DIGEST_BYTES


def save(patch: Patch, path: str | os.PathLike[str]) -> None:
    """Write a patch to a file, which is there whole or not at all: it is written beside and then moved."""
    replace(path, lambda draft: draft.write_bytes(to_bytes(patch)))


def load(path: str | os.PathLike[str]) -> Patch:
    """Return the patch of a file.

    Raises:
        ValueError: it is no patch, or is truncated or damaged. That it is not does not prove who wrote it.
    """
    return from_bytes(Path(path).read_bytes(), str(path))


def to_bytes(patch: Patch) -> bytes:
    """Return a patch as it is sent."""
    content = _head(patch) + patch.body
    return content + hashlib.sha256(content).digest()


def from_bytes(content: bytes, what: str) -> Patch:
    """Return the patch that `to_bytes` was given. Raises ValueError, which names ``what``, where it is damaged."""
    if content[: len(MAGIC)] != MAGIC[: len(content)] or not content:
        raise ValueError(f"{what} must be a patch that micro.patches.save wrote, it begins with other bytes")
    body = memoryview(content)[:-DIGEST_BYTES]
    if hashlib.sha256(body).digest() != content[-DIGEST_BYTES:]:
        raise ValueError(f"{what} is truncated or damaged, its digest differs: copy it again")
    stop = START + int.from_bytes(content[len(MAGIC) : START], "little")
    base, result, tensors = json.loads(content[START:stop])
    changes = (Change(name, dtype, tuple(shape), tuple(map(tuple, pieces))) for name, dtype, shape, pieces in tensors)
    return Patch(base, result, tuple(changes), bytes(body[stop:]))


def _head(patch: Patch) -> bytes:
    words = json.dumps([patch.base, patch.result, patch.tensors], separators=(",", ":")).encode()
    return MAGIC + len(words).to_bytes(START - len(MAGIC), "little") + words


def replace(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Have a file written beside ``path``, and then moved there."""
    draft = Path(f"{os.fspath(path)}.draft")
    try:
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
