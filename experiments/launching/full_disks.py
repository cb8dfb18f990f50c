"""A launch whose run folder is on a full, read-only or broken disk: its cause reaches the user all the same."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from experiments.launching.failures import Failure, Kind
from experiments.runs.atomic_files import cannot_write
from experiments.runs.disks import is_of_disk, spare_folders, try_to_write


class LossyLog(logging.FileHandler):
    """A log that leaves out what its disk does not take: an error of the log would hide the cause of a failure."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or nothing."""
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        """Print nothing."""

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            super().close()


@contextmanager
def spare_reports() -> Iterator[Path | None]:
    """Yield a folder on a disk that can be written, for reports that the run folder cannot take; None without one."""
    folder = next(spare_folders("micro-reports-"), None)
    try:
        yield folder
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def blame_disk(failure: Failure, run_dir: Path) -> Failure:
    """Return the failure of a rank that ended without a report, with the run's disk as its cause where it is one.

    So too for a rank that lost contact: that of another node may have had no place for its report.
    """
    is_lost = failure.kind == Kind.LOST_PEER
    if not is_lost and (failure.kind != Kind.EXIT or failure.traceback):
        return failure
    try:
        try_to_write(run_dir)
    except OSError as error:
        if is_of_disk(error):
            message = f"{cannot_write(run_dir, error)}" + (f"; {failure.message}" if is_lost else "")
            return replace(failure, message=message, of_disk=True)
    return failure
