"""Records as JSON lines, written so that a crash at any moment loses no complete row.

A row is complete when its newline is in the file. A killed writer leaves at most one incomplete row, which readers
skip and the next writer removes. Its last key is a sum of it and of the rows before it (row_chain.py), which readers
verify and take out (whole_rows.py). NaN and infinity are written as ``null``; pandas turns ``null`` in a column of
numbers back into NaN.
"""

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from experiments.runs.atomic_files import cannot_write, to_json
from experiments.runs.row_chain import NO_ROWS, ROWS_ARE_MISSING, chained, own_sum, without_sum
from experiments.runs.whole_rows import DamagedRows, Extent, Row, complete_lines, row_or_nothing, whole_rows

_TAIL_BYTES = 1 << 16  # how far back LastRow looks for the last row


class RecordWriter:
    """Append rows to a file of JSON lines, each with a single write.

    Args:
        path: The file; it is made if it is missing, in a folder that exists. An incomplete last row is
            removed.
        after_gap: Earlier rows are lost, so that readers find the first new row not to follow the last one.

    Raises:
        RecordError: The file cannot be opened.
    """

    def __init__(self, path: Path, *, after_gap: bool = False) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._num_rows, last = _cut_incomplete_row(self._descriptor)
        except OSError as error:
            raise cannot_write(path, error) from None
        self._sum = ROWS_ARE_MISSING if after_gap else own_sum(last) or NO_ROWS

    @property
    def extent(self) -> Extent:
        """How many rows the file has, and the sum of the last of them."""
        return Extent(self._num_rows, f"{self._sum:08x}")

    def append(self, row: Mapping[str, Any]) -> None:
        """Write ``row``, whole or not at all.

        Args:
            row: Plain Python values: numbers, strings, booleans, None, lists and dicts of them.

        Raises:
            RecordError: The disk is full, or the file cannot be written for another reason.
            TypeError: A value is not plain, for instance a tensor.
        """
        data, own = chained(to_json(row).encode(), self._sum)
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            raise cannot_write(self.path, error, needed=len(data)) from None
        if written < len(data):
            self._cut_last(written)
            raise cannot_write(self.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), needed=len(data))
        self._sum, self._num_rows = own, self._num_rows + 1

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
            row = row_or_nothing(lines[-2]) or self._row  # a display ignores a line that is no record
            self._row = without_sum(row)
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
        return [without_sum(row) for row in map(row_or_nothing, whole.splitlines()) if row is not None]


def read_records(path: Path) -> list[Row]:
    """Return the rows of a file of JSON lines, verified; an incomplete last row is skipped.

    Raises:
        DamagedRows: A row is not as it was written, or rows before it are missing.
        RecordError: The file cannot be read.
    """
    span = whole_rows(path)
    if span.problem:
        raise DamagedRows(span.problem)
    rows = [row_or_nothing(line) for line in complete_lines(path, span.end)]
    if None in rows:
        raise DamagedRows(f"{path}, line {rows.index(None) + 1} is not a record")
    return [without_sum(row) for row in rows if row is not None]


def read_remaining_records(path: Path) -> list[Row]:
    """Return the rows of a damaged file that can be read, whatever is between them. Raises: RecordError."""
    rows = map(row_or_nothing, complete_lines(path))
    return [without_sum(row) for row in rows if row is not None]


def _cut_incomplete_row(descriptor: int, *, block: int = 1 << 20) -> tuple[int, bytes]:
    """Shorten the file to the end of its last complete row; return the number of its rows, and the last of them."""
    num_rows, end, before, last = 0, 0, 0, b""
    size = os.fstat(descriptor).st_size
    offset = 0
    while offset < size:
        data = os.pread(descriptor, block, offset)
        if newlines := data.count(b"\n"):
            num_rows += newlines
            final = data.rfind(b"\n")
            inner = data.rfind(b"\n", 0, final)
            before = offset + inner + 1 if inner >= 0 else end
            end = offset + final + 1
        offset += len(data)
    if end < size:
        os.ftruncate(descriptor, end)
    if end:
        last = os.pread(descriptor, end - before, before)
    return num_rows, last
