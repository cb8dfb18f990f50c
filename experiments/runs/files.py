"""Write files atomically, verify them by size and SHA-256, and report full or failing disks."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from rich.filesize import decimal

from experiments.config.errors import CannotWrite, UserError

if TYPE_CHECKING:  # it takes a second, which --help and a mistake need not wait for
    import pandas as pd

_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_DISK = (*_FULL, errno.EROFS, errno.EIO, errno.EFBIG)  # of the whole disk: another file there would meet the same
_TRIAL = bytes(4096)  # one block: a full disk may still make an empty file


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
            raise Damaged(f"{path} has changed: it has {size} bytes, {self.bytes} were written")


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


def write_atomic(path: Path, data: str | bytes) -> Path:
    """Write a file, whole or not at all, in a folder that is made if it is missing; return it. Raises: CannotWrite."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)
    return path


def write_csv(numbers: "pd.DataFrame", path: Path) -> Path:
    """Write numbers with eight digits and the same line ends everywhere; return the path. Raises: CannotWrite."""
    return write_atomic(path, numbers.to_csv(index=False, float_format="%.8g", lineterminator="\n"))


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


def is_of_disk(error: OSError) -> bool:
    """Return whether an error is that of a full, read-only or broken disk."""
    return error.errno in _OF_DISK


def reason(error: OSError, path: Path | None = None) -> str:
    """Return the operating system's message in lower case; where ``path`` has too little space, with what is free."""
    words = (error.strerror or str(error)).lower()
    if path is None or error.errno not in _FULL:
        return words
    usage = shutil.disk_usage(next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir()))
    return f"{words} ({decimal(usage.free)} of {decimal(usage.total)} free)"


def cannot_write(path: Path, error: OSError) -> CannotWrite:
    """Return the error that ``path`` cannot be written."""
    return CannotWrite(f"cannot write {path}: {reason(error, path)}; fix that and run the same command again")


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


def try_to_write(folder: Path) -> None:
    """Write a small file in a folder, which is made if it is missing; what was made is removed again.

    Only this shows whether a disk can be written: permissions do not count for root, and a full disk has them. Raises:
    OSError.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".micro-", dir=folder, buffering=0) as file:
            if file.write(_TRIAL) < len(_TRIAL):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
    finally:
        for path in missing:
            with suppress(OSError):  # never made, or in use by another process meanwhile
                path.rmdir()


def check_folder(path: Path, option: str = "--out", *, by_writing: bool = True) -> None:
    """Find out, by writing or only by looking, whether a folder takes files.

    Args:
        option: that named the folder.

    Raises:
        UserError: it does not.
    """
    try:
        at = next(place for place in (path, *path.parents, *path.absolute().parents) if place.exists())
        if not at.is_dir():
            raise UserError(f"cannot write into {path}: {at} is no folder; choose another {option}")
        if by_writing:
            try_to_write(path)
    except OSError as error:
        raise UserError(f"cannot write into {path}: {reason(error, path)}; choose another {option}") from None
