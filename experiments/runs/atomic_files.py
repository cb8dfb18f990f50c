"""Files that are written whole or not at all, and whose size and SHA-256 are kept to verify them later."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from experiments.config.errors import UserError
from experiments.runs.disks import explained, is_of_disk, reason, remedy


class CannotWrite(UserError):
    """A file of a run cannot be written: one line with the file, the reason and what to do."""


class Damaged(UserError):
    """A file of a run is missing or is not as it was written: one line with the file and what is wrong."""


class Digest(NamedTuple):
    """Size and SHA-256 of a file, or of its beginning."""

    bytes: int = 0
    sha256: str = hashlib.sha256().hexdigest()

    def check(self, path: Path, *, begins: bool = False) -> None:
        """Check that a file is what was written; with ``begins`` more may follow. Raises: Damaged."""
        try:
            size = path.stat().st_size
            found = digest_of(path, self.bytes if begins else None)
        except OSError as error:
            raise Damaged(f"{path} is missing or cannot be read: {reason(error)}") from None
        if found != self:
            raise Damaged(f"{path} is not as it was written: it has {size} bytes, {self.bytes} were written")


def digest_of(path: Path, size: int | None = None) -> Digest:
    """Return the digest of a file, or of its first bytes. Raises: OSError."""
    with path.open("rb") as file:
        if size is None:
            digest = hashlib.file_digest(file, "sha256")
            return Digest(file.tell(), digest.hexdigest())
        start = file.read(size)
        return Digest(len(start), hashlib.sha256(start).hexdigest())


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when the context ends without an error.

    A reader, or a crash, sees the old file or the whole new one, which is on the disk before it gets its name; nothing
    is left of an attempt that fails. Raises: CannotWrite.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        flush_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError):
            raise cannot_write(path, error) from None
        raise


def write_atomic(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, whole or not at all. Raises: CannotWrite."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` as one JSON document, whole or not at all. Raises: CannotWrite; TypeError: it is not plain."""
    write_atomic(path, to_json(value, indent=2) + "\n")


def load_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if the file is missing, damaged or holds something else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def to_json(value: Mapping[str, Any], indent: int | None = None) -> str:
    """Return ``value`` as JSON, with ``null`` for NaN and infinity. Raises: TypeError: it is not plain."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:  # what json raises for NaN and infinity
        return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None), indent=indent)


def flush_folder(path: Path) -> None:
    """Flush a folder to the disk, so that a rename inside it survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> CannotWrite:
    """Return the error that ``path`` cannot be written."""
    return CannotWrite(f"cannot write {path}: {explained(error, path)}; {remedy(error)} and start the run again")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Have an OSError in this context raise CannotWrite for ``path``."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from None


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Have a full, read-only or broken disk raise CannotWrite in this context, whatever was written in ``folder``."""
    try:
        yield
    except OSError as error:
        if not is_of_disk(error):
            raise
        raise cannot_write(Path(error.filename) if isinstance(error.filename, str) else folder, error) from None
