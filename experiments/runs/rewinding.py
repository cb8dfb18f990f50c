"""Rewind a file of records to an earlier step: later rows move to another file, and none is lost."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from experiments.runs.atomic_files import RecordError, atomic_file, cannot_write
from experiments.runs.disks import reason
from experiments.runs.json_lines import parse_row


def find_later(path: Path, is_later: Callable[[int], bool]) -> int | None:
    """Return the offset of the first row whose ``step`` is later, or of an incomplete last row; None without either.

    Raises:
        RecordError: The file cannot be read, or a row is not a record.
    """
    try:
        with path.open("rb") as file:
            return _offset_of_later(file, path, is_later)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"cannot read records: {path}: {reason(error)}") from None


def move_tail(path: Path, start: int, destination: Path) -> None:
    """Move the bytes from ``start`` on to another file; they are removed here after they are on the disk there.

    Raises:
        RecordError: A file cannot be written.
    """
    try:
        with path.open("r+b") as source:
            source.seek(start)
            with atomic_file(destination, one_writer=True) as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
            source.truncate(start)
            os.fsync(source.fileno())
    except OSError as error:
        raise cannot_write(path, error) from None


def replace_by_copy(path: Path) -> None:
    """Replace a file by a copy of itself, which a process that has the file open does not write.

    Raises:
        RecordError: The file cannot be read or written.
    """
    try:
        with path.open("rb") as source, atomic_file(path, one_writer=True) as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    except OSError as error:
        raise cannot_write(path, error) from None


def _offset_of_later(file: BinaryIO, path: Path, is_later: Callable[[int], bool]) -> int | None:
    start, num_rows = 0, 0
    while block := file.readlines(1 << 20):  # whole rows; steps ascend, so a block ends with its latest row
        if _moves(block[-1], path, num_rows + len(block), is_later):
            break
        start += sum(map(len, block))
        num_rows += len(block)
    for number, line in enumerate(block, start=num_rows + 1):
        if _moves(line, path, number, is_later):
            return start
        start += len(line)
    return None


def _moves(line: bytes, path: Path, number: int, is_later: Callable[[int], bool]) -> bool:
    return not line.endswith(b"\n") or is_later(_step_of(line, path, number))


def _step_of(line: bytes, path: Path, number: int) -> int:
    step = parse_row(line, path, number).get("step")
    if isinstance(step, int):
        return step
    raise RecordError(f"{path}, line {number} has no step; remove the line, or run again")
