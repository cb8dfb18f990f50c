"""One owner of a run folder at a time: a lock of the operating system, and a token that its owner leaves there.

The lock is on ``.lock`` and ends with its process. On network disks it often holds for one machine only, and some have
no locks at all. There a second job would take the folder over: the owner before reads the token in ``.owner.json``
before each commit, finds another one, and stops.
"""

import errno
import fcntl
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from experiments.config.errors import UserError, one_line
from experiments.runs.atomic_files import cannot_write, load_json, write_json

_WAIT_S = 0.1  # how long a new owner waits: longer than ``is_locked`` holds its shared lock
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}  # of some network disks
_tokens: dict[Path, str] = {}  # of the folders that this process owns


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that owns a run folder.

    Attributes:
        token: different for each time that a folder is taken.
        host, pid, job, since: for the user; ``job`` is that of SLURM, empty outside of it.
    """

    token: str
    host: str
    pid: int
    job: str
    since: str

    def __str__(self) -> str:
        job = f" ({self.job})" if self.job else ""
        return one_line(f"pid {self.pid} on {self.host}{job} since {self.since}")


class FolderInUse(UserError):
    """A run folder that another process owns."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path, self.holder = path, str(owner_of(path) or "another process")

    def __str__(self) -> str:
        return f"run folder {self.path} is in use by {self.holder}; wait for it, or choose another folder"


class FolderLost(UserError):
    """A run folder that this process owned, and that another one has taken over or removed."""


@contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Own a folder while the context lasts; make it if it is missing.

    Raises:
        FolderInUse: another process owns it.
        CannotWrite: the folder cannot be made or written.
    """
    make_folder(path)
    # No soft lock: its file would remain after its owner was killed.
    lock = FileLock(path / ".lock", timeout=_WAIT_S, poll_interval=_WAIT_S / 5, fallback_to_soft=False)
    owner = _this_process()
    try:
        lock.acquire()
    except Timeout:
        raise FolderInUse(path) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise cannot_write(path, error) from None
    try:
        write_json(_owner_path(path), asdict(owner))
        _tokens[path.resolve()] = owner.token
        yield
    finally:
        _tokens.pop(path.resolve(), None)
        if owner_of(path) == owner:
            with suppress(OSError):
                _owner_path(path).unlink()
        lock.release()


def check_owned(path: Path) -> None:
    """Check that this process still owns a folder that it has taken; it does nothing in one that it has not.

    Raises:
        FolderLost: another process has taken it over, or it was removed.
    """
    token, owner = _tokens.get(path.resolve()), owner_of(path)
    if token is None or (owner and owner.token == token):
        return
    what = f"was taken over by {owner}" if owner else "was removed"
    raise FolderLost(f"run folder {path} {what}: this process stops and writes nothing more there")


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a folder at this moment.

    Nothing is written, so this works for folders of other users too; and because this lock is shared, several processes
    can look at once. filelock can do neither.
    """
    try:
        descriptor = os.open(path / ".lock", os.O_RDONLY)
    except OSError:
        return False  # no process has ever owned the folder, or this user may not read the file
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def owner_of(path: Path) -> Owner | None:
    """Return the last owner of a folder; None after it has given the folder back, or where it cannot be read."""
    try:
        return Owner(**load_json(_owner_path(path)))
    except TypeError:
        return None


def make_folder(path: Path) -> None:
    """Make a folder and its parents where they are missing. Raises: CannotWrite."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from None


def _owner_path(path: Path) -> Path:
    return path / ".owner.json"


def _this_process() -> Owner:
    return Owner(
        token=secrets.token_hex(8),
        host=socket.gethostname(),
        pid=os.getpid(),
        job=_slurm_job(os.environ),
        since=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _slurm_job(environ: Mapping[str, str]) -> str:
    """Return the name of the SLURM job that this process belongs to, a requeued one apart; empty outside of SLURM."""
    job, restart = environ.get("SLURM_JOB_ID"), environ.get("SLURM_RESTART_COUNT", "0")
    return f"SLURM job {job}" + (f", restart {restart}" if restart != "0" else "") if job else ""
