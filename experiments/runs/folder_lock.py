"""The lock of a run folder: one process owns it at a time, on this machine and on all others that share the disk.

Two locks together: that of the operating system, on ``.lock``, which ends with its process but on network disks often
holds for one machine only, and the lease, which others take over when its owner gives no sign of life.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from experiments.config.errors import UserError
from experiments.runs.atomic_files import DiskError
from experiments.runs.disks import explained, is_of_disk, remedy
from experiments.runs.lease import Entry, Lease, LeaseHeld, newest, take, wait_for_owner
from experiments.runs.owner import Owner, this_process

_WAIT_S = 0.1  # how long a new owner waits: longer than ``is_locked`` holds its shared lock
_RECENT_S = 60.0  # an owner on another machine counts as alive that long after its last renewal: clocks differ
_NO_FLOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}  # some network disks


class FolderInUse(UserError):
    """A run folder that another process owns.

    Attributes:
        entry: The lease of the owner, None if it is unknown.
    """

    def __init__(self, path: Path, entry: Entry | None) -> None:
        super().__init__(path, entry)
        self.path, self.entry = path, entry

    @property
    def holder(self) -> str:
        """The owner, for the user."""
        return str(self.entry.owner) if self.entry and self.entry.owner else "another process"

    def __str__(self) -> str:
        return f"run folder {self.path} is in use by {self.holder}; wait for it, or choose another folder"


@contextmanager
def lock_folder(path: Path, *, launch: str | None = None) -> Iterator[Lease]:
    """Own a folder while the context lasts; make it if it is missing.

    Args:
        launch: For a run of several nodes, what its nodes have in common and no other launch has. The error then
            names an owner that is certainly alive.

    Raises:
        FolderInUse: Another process owns it.
        LeaseLost: In the main thread, at any moment: another process has taken over, because this one stood still.
        UserError: The folder cannot be made or written.
    """
    with ExitStack() as owned:
        lease = _acquire(path, launch, owned)
        with lease.kept():
            yield lease


def follow_owner(path: Path, entry: Entry) -> Lease:
    """Return the lease of the node that owns the folder, for another node of the same launch; see ``Lease.kept``."""
    assert entry.owner is not None
    return Lease(path, entry.number, entry.owner.token)


def is_locked(path: Path) -> bool:
    """Return whether a process owns the folder at this moment, as far as this can be seen at once.

    Nothing is written, so this works for folders of other users too; and because the lock is shared, several processes
    can check at once. filelock can do neither: it takes an exclusive lock on a file that it opens for writing. An owner
    on another machine is judged by the clock; ``lock_folder`` looks for as long as it takes.
    """
    is_locked_by_system = _is_locked_by_system(path)
    entry = _unreleased(path)
    if is_locked_by_system or entry is None:
        return bool(is_locked_by_system)
    if entry.owner and entry.owner.is_dead(has_flock=is_locked_by_system is False):
        return False
    is_recent = abs(time.time() - entry.beat / 1e9) < _RECENT_S
    return is_recent or bool(entry.owner and entry.owner.is_alive())


def owner_of(path: Path) -> Owner | None:
    """Return the owner of a folder that is locked, None if it is unknown."""
    entry = _unreleased(path)
    return entry.owner if entry else None


def cannot_use(path: Path, error: OSError) -> UserError:
    """Return the error that a run folder cannot be used: one line with the reason and what to do."""
    line = f"cannot use run folder {path}: {explained(error, path)}; {remedy(error)}"
    return DiskError(f"{line} and start the run again") if is_of_disk(error) else UserError(line)


def _acquire(path: Path, launch: str | None, owned: ExitStack) -> Lease:
    """Take both locks; ``owned`` releases that of the operating system."""
    made = _make_folder(path)
    try:
        has_flock = _lock_by_system(path, owned)
        if has_flock is None:
            raise FolderInUse(path, wait_for_owner(path) if launch else _unreleased(path))
        return take(path, this_process(has_flock=has_flock, launch=launch))
    except LeaseHeld as held:
        raise FolderInUse(path, held.entry) from None
    except OSError as error:
        owned.close()
        _remove_folders(made)
        raise cannot_use(path, error) from None


def _lock_by_system(path: Path, owned: ExitStack) -> bool | None:
    """Lock ``.lock``; return False where the disk has no such locks, None where another process holds it.

    Raises:
        OSError: The file cannot be written.
    """
    # No soft lock: its file would remain after its owner was killed.
    lock = FileLock(_lock_path(path), timeout=_WAIT_S, poll_interval=_WAIT_S / 5, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return False
    owned.callback(lock.release)
    return True


def _is_locked_by_system(path: Path) -> bool | None:
    """Return whether another process holds the lock of the operating system; None if this cannot be known."""
    try:
        descriptor = os.open(_lock_path(path), os.O_RDONLY)
    except OSError:
        return None  # no process has ever owned the folder, or this user may not read the file
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def _unreleased(path: Path) -> Entry | None:
    try:
        entry = newest(path)
    except OSError:
        return None
    return None if entry is None or entry.is_released else entry


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
