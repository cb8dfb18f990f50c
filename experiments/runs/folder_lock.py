"""The lock of a run folder: one process owns it at a time, and the lock is released when that process ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from experiments.config.errors import UserError
from experiments.runs.atomic_files import DiskError
from experiments.runs.disks import explained, is_of_disk, remedy

_WAIT_S = 0.1  # how long a new owner waits: longer than ``is_locked`` holds its shared lock


class FolderInUse(UserError):
    """A run folder that another process owns."""


@contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Own a folder while the context lasts; make it if it is missing.

    Raises:
        FolderInUse: Another process owns it.
        UserError: The folder cannot be made or written.
    """
    lock = _lock(path)
    try:
        yield
    finally:
        lock.release()


def is_locked(path: Path) -> bool:
    """Return whether a process owns the folder at this moment.

    Nothing is written, so this works for folders of other users too; and because the lock is shared, several processes
    can check at once. filelock can do neither: it takes an exclusive lock on a file that it opens for writing.
    """
    try:
        descriptor = os.open(_lock_path(path), os.O_RDONLY)
    except OSError:
        return False  # no process has ever owned it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def cannot_use(path: Path, error: OSError) -> UserError:
    """Return the error that a run folder cannot be used: one line with the reason and what to do."""
    line = f"cannot use run folder {path}: {explained(error, path)}; {remedy(error)}"
    return DiskError(f"{line} and start the run again") if is_of_disk(error) else UserError(line)


def _lock(path: Path) -> FileLock:
    made = _make_folder(path)
    # No soft lock: its file would remain after its owner was killed.
    lock = FileLock(_lock_path(path), timeout=_WAIT_S, poll_interval=_WAIT_S / 5, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        message = f"run folder {path} is in use by another process; wait for it, or choose another folder"
        raise FolderInUse(message) from None
    except OSError as error:
        _remove_folders(made)
        raise cannot_use(path, error) from None
    return lock


def _lock_path(path: Path) -> Path:
    return path / ".lock"


def _make_folder(path: Path) -> list[Path]:
    """Make a folder and its parents; return those that were missing, the deepest first."""
    missing: list[Path] = []
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _remove_folders(missing)
        raise cannot_use(path, error) from None
    return missing


def _remove_folders(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # never made, or not empty
            folder.rmdir()
