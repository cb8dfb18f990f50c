"""Rewind the records of a run to an earlier step: later rows move to another file, and none is lost."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from experiments.runs.atomic_files import atomic_file, cannot_write
from experiments.runs.whole_rows import (
    DamagedRows,
    Extent,
    Span,
    check_rows,
    whole_rows,
)

Records = Mapping[str, Extent]  # of steps and of epochs


def rows_before(steps: Path, epochs: Path, step: int, records: Records | None) -> tuple[Span, Span]:
    """Return the rows of steps and of epochs of the first ``step`` steps.

    Args:
        records: What a checkpoint of that step holds of them; None for one of an earlier version.

    Raises:
        DamagedRows: A row of them is missing or damaged.
        RecordError: A file cannot be read.
    """
    if records is not None:
        return check_rows(steps, records["steps"]), check_rows(epochs, records["epochs"])
    found = _until(steps, lambda index: index >= step)
    if found.step < step - 1:
        many = f"{step} steps were done" if step > 1 else "a step was done"
        raise DamagedRows(found.problem or f"{steps} ends before step {found.step + 1}, and {many}")
    finished = _until(epochs, lambda num_done: num_done > step)
    if finished.problem:
        raise DamagedRows(finished.problem)
    return found, finished


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


def _until(path: Path, is_later: Callable[[int], bool]) -> Span:
    return whole_rows(path, is_later=is_later) if path.exists() else Span()
