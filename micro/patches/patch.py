"""The class Patch and its file format: a JSON header, the body, and the SHA-256 of both."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

MAGIC = b"micro patch 1\n"
START, DIGEST_BYTES = len(MAGIC) + 8, 32  # the JSON starts after 8 bytes with its length


class Change(NamedTuple):
    """The changes of one tensor.

    Attributes:
        dtype: torch's name of it, such as "bfloat16".
        pieces: for each piece of the tensor, the number of changed elements and the bytes of their differences; empty
            if nothing changed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Patch:
    """The difference between two versions of weights. Build it with `diff`.

    Attributes:
        base, result: SHA-256 of the weights before and after, as returned by `digest`.
        tensors: all tensors of the weights, including unchanged ones.
        body: positions and differences of the changed elements.
    """

    base: str
    result: str
    tensors: tuple[Change, ...]
    body: bytes

    @property
    def num_changed(self) -> int:
        """Number of changed elements; real and imaginary parts count separately."""
        return sum(count for tensor in self.tensors for count, _ in tensor.pieces)

    @property
    def numel(self) -> int:
        """Number of elements of all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of the file, and of the message."""
        return len(_head(self)) + len(self.body) + DIGEST_BYTES


def save(patch: Patch, path: str | os.PathLike[str]) -> None:
    """Write a patch to a file, atomically."""
    replace(path, lambda draft: draft.write_bytes(to_bytes(patch)))


def load(path: str | os.PathLike[str]) -> Patch:
    """Return the patch of a file.

    Raises:
        ValueError: it is not a patch, or is truncated or damaged. A valid file is no proof of its author.
    """
    return from_bytes(Path(path).read_bytes(), str(path))


def to_bytes(patch: Patch) -> bytes:
    """Return a patch as bytes, as in a file."""
    content = _head(patch) + patch.body
    return content + hashlib.sha256(content).digest()


def from_bytes(content: bytes, what: str) -> Patch:
    """Return the patch from the bytes of `to_bytes`. Raises ValueError, which names ``what``, if they are damaged."""
    if content[: len(MAGIC)] != MAGIC[: len(content)] or not content:
        raise ValueError(f"{what} must be a patch written by micro.patches.save, it begins with other bytes")
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
    """Replace the file ``path`` atomically: ``write`` writes a draft, which is then moved."""
    draft = Path(f"{os.fspath(path)}.draft")
    try:
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
