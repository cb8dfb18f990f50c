"""One rank's part of a checkpoint: written with its checksum, and verified when it is read."""

import hashlib
import os
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from experiments.config.errors import UserError
from experiments.runs.atomic_files import cannot_write, flush_file
from experiments.runs.disks import reason

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter)
_DESCRIPTORS = (torch.Size, torch.dtype, torch.device)


class TornCheckpoint(UserError):
    """A checkpoint with a missing or damaged file; an earlier checkpoint may still be complete."""


class PartDigest(NamedTuple):
    """Checksum and size of one rank's part."""

    sha256: str
    size: int


def write_part(path: Path, state: Mapping[str, Any]) -> PartDigest:
    """Write a state to ``path``; return its checksum and size.

    Raises:
        UserError: The disk is full, or the file cannot be written for another reason; nothing is left of it.
        TypeError: A value has a type that a checkpoint cannot hold.
    """
    plain = dict(state)
    _check_plain(plain, "state")
    hashed = None
    try:
        with path.open("wb") as file:
            hashed = _HashedFile(file)
            torch.save(plain, hashed)  # type: ignore[arg-type] # torch calls write and flush alone
            digest = hashed.digest()
            flush_file(file)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise cannot_write(path, error, needed=hashed.size if hashed else None) from None
    return digest


def read_part(path: Path, digest: PartDigest) -> dict[str, Any]:
    """Return the state in ``path``, its tensors on the CPU.

    Raises:
        TornCheckpoint: The file is missing or damaged.
    """
    try:
        with path.open("rb") as file:
            _verify(file, path, digest)
            return _load(file, path)
    except OSError as error:
        raise torn(path, reason(error)) from None


def torn(path: Path, what: str) -> TornCheckpoint:
    """Return the error that names the file of a checkpoint that cannot be used, and the reason."""
    return TornCheckpoint(f"cannot use checkpoint {path.parent}: {path.name}: {what}")


def _check_plain(value: Any, name: str) -> None:
    """Raise TypeError for a value that ``torch.load(weights_only=True)`` would later refuse to read."""
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _check_plain(key, f"the key {key!r} of {name}")
            _check_plain(item, f"{name}[{key!r}]")
    elif type(value) in (list, tuple, set):
        for index, item in enumerate(value):
            _check_plain(item, f"{name}[{index}]")
    elif type(value) not in _SCALARS and not isinstance(value, _DESCRIPTORS):
        kinds = "a checkpoint holds tensors, numbers, strings, None, and dicts, lists, tuples and sets of them"
        raise TypeError(f"{name} is of type {type(value).__name__}; {kinds}")


class _HashedFile:
    """A file that computes the digest of what is written to it, so that it need not be read again.

    torch's writer replaces a file's error by its own. So this class keeps the first error and raises it
    in ``digest``.

    Attributes:
        size: bytes to be written so far, those after an error too.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sha256, self.size = file, hashlib.sha256(), 0
        self._error: OSError | None = None

    def write(self, data: memoryview | bytes) -> int:
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
            self._sha256.update(data)
            self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: ``write_part`` flushes the file to the disk."""

    def digest(self) -> PartDigest:
        if self._error is not None:
            raise self._error
        return PartDigest(self._sha256.hexdigest(), self.size)


def _verify(file: BinaryIO, path: Path, part: PartDigest) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != part.size:
        raise torn(path, f"{size} bytes long where {part.size} were written")
    if hashlib.file_digest(file, "sha256").hexdigest() != part.sha256:  # type: ignore[arg-type] # it is readable
        raise torn(path, "not the bytes that were written (SHA-256 differs)")
    file.seek(0)


def _load(file: BinaryIO, path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        first = str(error).partition("\n")[0]
        raise torn(path, f"torch {torch.__version__} cannot read it: {first}") from None
    return state
