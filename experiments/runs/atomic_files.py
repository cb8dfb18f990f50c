"""Write files whole or not at all, and the error messages of files that cannot be written."""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from experiments.config.errors import UserError
from experiments.runs.disks import explained, is_of_disk, remedy

T = TypeVar("T")


class RecordError(UserError):
    """A file of a run that cannot be written or read: one line that names the file, what is wrong and what to do."""


class DiskError(RecordError):
    """A file that cannot be written because its disk is full, read-only or broken: no other run can go on there."""


@contextmanager
def atomic_file(path: Path, *, one_writer: bool = False) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when the context ends without an error.

    A reader, or a crash, sees the old file or the whole new one. The new file is on the disk before it gets its name.

    Args:
        one_writer: No other process writes ``path``, so a draft that a crash left is overwritten.

    Raises:
        RecordError: The file cannot be written; nothing is left of the attempt.
    """
    draft = path.with_name(f".{path.name}.tmp" if one_writer else f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            yield file
            flush_file(file)
        os.replace(draft, path)
        flush_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError):
            raise cannot_write(path, error) from None
        raise


def remove_drafts(folder: Path) -> None:
    """Remove the drafts of atomic files that killed processes left in a folder, into which no process writes now."""
    for draft in folder.glob(".*.tmp"):
        with suppress(OSError):
            draft.unlink()


def write_atomic(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, whole or not at all.

    Raises:
        RecordError: The file cannot be written; nothing is left of the attempt.
    """
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` to ``path`` as one JSON document, whole or not at all; NaN and infinity become ``null``.

    Raises:
        RecordError: The file cannot be written.
        TypeError: A value is not plain.
    """
    write_atomic(path, to_json(value, indent=2) + "\n")


def load_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if the file is missing, damaged or holds something else."""
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}


def parse_json(text: bytes) -> dict[str, Any]:
    """Return a JSON object, whoever wrote it.

    Raises:
        ValueError: it is something else, is nested too deeply, or holds a number that is not finite.
    """
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def from_json(kind: type[T], text: bytes) -> T | None:
    """Return the dataclass of plain values that a JSON object holds; None where it is not whole."""
    try:
        found = kind(**parse_json(text))
    except (ValueError, TypeError):
        return None
    types: dict[str, Any] = {each.name: each.type for each in fields(cast(Any, kind))}
    values = {name: getattr(found, name) for name in types}
    is_whole = all(isinstance(values[name], float | int if each is float else each) for name, each in types.items())
    return found if is_whole else None


def to_json(value: Mapping[str, Any], indent: int | None = None) -> str:
    """Return ``value`` as JSON, with ``null`` for NaN and infinity, which JSON does not have.

    Raises:
        TypeError: A value is not plain.
    """
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:  # what json raises for NaN and infinity
        return json.dumps(_without_nan(value), allow_nan=False, indent=indent)


class Digest(NamedTuple):
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


def digest_of(path: Path, size: int | None = None) -> Digest:
    """Return the digest of a file, or of its first bytes. Raises: OSError."""
    with path.open("rb") as file:
        if size is None:
            digest = hashlib.file_digest(file, "sha256")
            return Digest(file.tell(), digest.hexdigest())
        start = file.read(size)
        return Digest(len(start), hashlib.sha256(start).hexdigest())


def flush_file(file: BinaryIO) -> None:
    """Flush a file to the disk, so that its content survives a loss of power."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Flush a folder to the disk, so that a rename inside it survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> RecordError:
    """Return the error that ``path`` cannot be written: one line with the reason and what to do."""
    line = f"cannot write {path}: {explained(error, path)}; {remedy(error)} and start the run again"
    return DiskError(line) if is_of_disk(error) else RecordError(line)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Have a full, read-only or broken disk raise DiskError in this context, whatever was being written in ``folder``.

    Raises:
        DiskError: an error of the disk that nothing else explained.
    """
    try:
        yield
    except OSError as error:
        if not is_of_disk(error):
            raise
        raise cannot_write(Path(error.filename) if isinstance(error.filename, str) else folder, error) from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"a number that is not finite: {text}")
    return value


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value
