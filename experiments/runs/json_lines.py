"""Records as JSON lines, written so that a crash at any moment loses no complete row.

A row is complete when its newline is in the file. A killed writer leaves at most one incomplete row, which readers
skip and the next writer removes. NaN and infinity are written as ``null``; pandas turns ``null`` in a column of
numbers back into NaN.
"""

import errno
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from experiments.runs.atomic_files import RecordError, cannot_write, to_json
from experiments.runs.disks import reason

Row = dict[str, Any]
_TAIL_BYTES = 1 << 16  # how far back LastRow looks for the last row


class RecordWriter:
    """Append rows to a file of JSON lines, each with a single write.

    Args:
        path: The file; it is made if it is missing, in a folder that exists. An incomplete last row is
            removed.

    Raises:
        RecordError: The file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            _cut_incomplete_row(self._descriptor)
        except OSError as error:
            raise cannot_write(path, error) from None

    def append(self, row: Mapping[str, Any]) -> None:
        """Write ``row``, whole or not at all.

        Args:
            row: Plain Python values: numbers, strings, booleans, None, lists and dicts of them.

        Raises:
            RecordError: The disk is full, or the file cannot be written for another reason.
            TypeError: A value is not plain, for instance a tensor.
        """
        data = to_json(row).encode() + b"\n"
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            raise cannot_write(self.path, error, needed=len(data)) from None
        if written < len(data):
            self._cut_last(written)
            raise cannot_write(self.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), needed=len(data))

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

    def _cut_last(self, num_bytes: int) -> None:
        with suppress(OSError):
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - num_bytes)

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LastRow:
    """Read the last complete row of a growing file of JSON lines; each call reads only new bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._row: Row = {}

    def read(self) -> Row:
        """Return the last row, an empty one if there is none yet."""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:  # the run was rewound to a checkpoint
                    self._offset, self._row = 0, {}
                file.seek(max(self._offset, size - _TAIL_BYTES))
                lines = file.read().rsplit(b"\n", 2)
                unfinished = lines[-1]
                self._offset = file.tell() - len(unfinished)
        except OSError:
            return self._row
        if len(lines) > 1:
            self._row = _row_or_nothing(lines[-2]) or self._row  # a display ignores a line that is no record
        return self._row


class NewRows:
    """Read the rows that were added to a file of JSON lines since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> list[Row]:
        """Return the new complete rows."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def read_records(path: Path) -> list[Row]:
    """Return the rows of a file of JSON lines; an incomplete last row is skipped.

    Raises:
        RecordError: The file cannot be read, or a complete line is not a JSON object.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read records: {path}: {reason(error)}") from None
    complete = data.split(b"\n")[:-1]
    return [parse_row(line, path, number) for number, line in enumerate(complete, start=1)]


def parse_row(line: bytes, path: Path, number: int) -> Row:
    """Return the row in line ``number`` of a file. Raises: RecordError where it is not a JSON object."""
    row = _row_or_nothing(line)
    if row is None:
        raise RecordError(f"{path}, line {number} is not a record; remove the line, or run again")
    return row


def _row_or_nothing(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _cut_incomplete_row(descriptor: int, *, block: int = 1 << 16) -> None:
    """Shorten the file to the end of its last complete row."""
    size = os.fstat(descriptor).st_size
    end = size
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
