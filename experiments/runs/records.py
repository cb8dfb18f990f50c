"""Records of a run: JSON lines, which a checkpoint and DONE describe by their number, length and SHA-256.

A row is complete when its newline is in the file. A killed writer leaves at most one incomplete row, which readers
skip. A run that resumes cuts its records back to what the checkpoint describes. NaN and infinity are written as
``null``; pandas turns ``null`` in a column of numbers back into NaN.
"""

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from experiments.runs.atomic_files import RecordError, atomic_file, cannot_write, digest_of, to_json
from experiments.runs.disks import reason

Row = dict[str, Any]

_TAIL_BYTES = 1 << 16  # how far back the last row is looked for


class DamagedRecord(RecordError):
    """A record that is not as it was written: one line with the file and what is wrong."""


class Extent(NamedTuple):
    """The first rows of a record: their number, their length and SHA-256."""

    rows: int = 0
    bytes: int = 0
    sha256: str = hashlib.sha256().hexdigest()

    @classmethod
    def parse(cls, value: Any) -> "Extent":
        """Return what ``_asdict`` returned. Raises: ValueError, LookupError, TypeError: it is something else."""
        return cls(int(value["rows"]), int(value["bytes"]), str(value["sha256"]))

    def check(self, path: Path, *, is_all: bool = False) -> None:
        """Check that a file begins with these rows.

        Args:
            is_all: nothing may follow them.

        Raises:
            DamagedRecord: it does not.
            RecordError: it cannot be read.
        """
        try:
            size = path.stat().st_size if path.exists() else 0
            found = digest_of(path, self.bytes).sha256 if size >= self.bytes > 0 else Extent().sha256
        except OSError as error:
            raise RecordError(f"cannot read records: {path}: {reason(error)}") from None
        if not path.exists() and self.rows:
            raise DamagedRecord(f"{path} is missing, with {self.rows} rows")
        if size < self.bytes:
            raise DamagedRecord(
                f"{path} ends after {size} bytes of {self.bytes}: some of its {self.rows} rows are gone"
            )
        if found != self.sha256:
            raise DamagedRecord(f"{path} was changed: its first {self.rows} rows are not those that were written")
        if is_all and size > self.bytes:
            raise DamagedRecord(f"{path} has more than the {self.rows} rows of the run: lines were added")


class RecordWriter:
    """Append rows to a file of JSON lines, each with a single write.

    The file is a new one, which takes the place of that before: a process that has lost the run's folder, and goes on,
    writes to the old one.

    Args:
        path: The file, in a folder that exists.
        kept: Its first rows, which stay; all others are dropped.

    Raises:
        DamagedRecord: The file does not begin with these rows.
        RecordError: The file cannot be written.
    """

    def __init__(self, path: Path, kept: Extent = Extent()) -> None:  # noqa: B008 - a tuple
        self.path, self._rows, self._bytes = path, kept.rows, kept.bytes
        kept.check(path)
        before = b""
        with suppress(FileNotFoundError), path.open("rb") as file:
            before = file.read(kept.bytes)
        self._sha256 = hashlib.sha256(before)
        with atomic_file(path, one_writer=True) as new:
            new.write(before)
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise cannot_write(path, error) from None

    @property
    def extent(self) -> Extent:
        """The rows that the file has."""
        return Extent(self._rows, self._bytes, self._sha256.hexdigest())

    def append(self, row: Mapping[str, Any]) -> None:
        """Write ``row``, whole or not at all.

        Args:
            row: Plain Python values: numbers, strings, booleans, None, lists and dicts of them.

        Raises:
            RecordError: The disk is full, or the file cannot be written for another reason.
            TypeError: A value is not plain, for instance a tensor.
        """
        data = f"{to_json(row)}\n".encode()
        try:
            if os.write(self._descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._bytes)
            raise cannot_write(self.path, error) from None
        self._rows, self._bytes = self._rows + 1, self._bytes + len(data)
        self._sha256.update(data)

    def is_removed(self) -> bool:
        """Return whether the file has no name any more: it was removed or replaced, and nobody will find its rows."""
        return os.fstat(self._descriptor).st_nlink == 0

    def sync(self) -> None:
        """Flush the rows to the disk, so that they survive a loss of power.

        Raises:
            RecordError: The disk is full.
        """
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def close(self) -> None:
        """Close the file. The operating system has the rows already: a missing close loses no row."""
        os.close(self._descriptor)

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def last_row(path: Path) -> Row:
    """Return the last complete row of a file of JSON lines; an empty one where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is incomplete
    except OSError:
        return {}
    return (_row(lines[-1]) if lines else None) or {}


def read_records(path: Path) -> list[Row]:
    """Return the rows of a file of JSON lines; an incomplete last row is skipped.

    Raises:
        DamagedRecord: A line is not a row.
        RecordError: The file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise RecordError(f"cannot read records: {path}: {reason(error)}") from None
    rows = [_row(line) for line in lines]
    if None in rows:
        raise DamagedRecord(f"{path}, line {rows.index(None) + 1} is not a record")
    return [row for row in rows if row is not None]


def _row(line: bytes) -> Row | None:
    """Return the row of a line, None where it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
