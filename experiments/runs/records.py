"""Write and read the records of a run: JSON lines, one row per step and per epoch.

A row is complete with its newline. A killed writer leaves at most one incomplete row, which readers skip. A resuming
run truncates its records to the state of its checkpoint. NaN and infinity are written as ``null``, which pandas reads
as NaN in columns of numbers.
"""

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.runs.files import Damaged, Digest, atomic_file, reason, to_json, writing

Row = dict[str, Any]

_TAIL_BYTES = 1 << 16  # how far back the last row is looked for


class RecordWriter:
    """Append rows to a file of JSON lines, each with a single write.

    The file is a new one, which takes the place of that before: a process that has lost the run's folder, and goes on,
    writes to the old one. Of that before its beginning stays, ``kept``, and all else is dropped.

    Raises: Damaged: the file does not begin so; CannotWrite.
    """

    def __init__(self, path: Path, kept: Digest = Digest()) -> None:  # noqa: B008 - a tuple
        before = b""
        if kept.bytes:
            kept.check(path, begins=True)
            before = path.read_bytes()[: kept.bytes]
        self.path, self._bytes, self._sha256 = path, kept.bytes, hashlib.sha256(before)
        with atomic_file(path) as new:
            new.write(before)
        with writing(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    @property
    def digest(self) -> Digest:
        """What the file has."""
        return Digest(self._bytes, self._sha256.hexdigest())

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row of plain Python values, whole or not at all. Raises: CannotWrite; TypeError: it is not plain."""
        data = f"{to_json(row)}\n".encode()
        with writing(self.path):
            try:
                if os.write(self._descriptor, data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._bytes)
                raise
        self._bytes += len(data)
        self._sha256.update(data)

    def sync(self) -> None:
        """Flush the rows to the disk, so that they survive a loss of power. Raises: CannotWrite."""
        with writing(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file. The operating system has the rows already: a missing close loses no row."""
        os.close(self._descriptor)


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
    """Return the rows of a file of JSON lines; an incomplete last row is skipped. Raises: Damaged."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise Damaged(f"cannot read records: {path}: {reason(error)}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is None:
            raise Damaged(f"{path}, line {number} is not a record")
        rows.append(row)
    return rows


def _row(line: bytes) -> Row | None:
    """Return the row of a line, None where it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
