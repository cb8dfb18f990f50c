"""The folder of one run: names of its files, its owner, and leftovers of unfinished attempts.

One process owns a folder at a time. It holds a file lock on ``.lock``, which ends with the process, and describes
itself in ``.owner.json``. Before each commit it checks that the lock file is still that of the folder.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from experiments.config.errors import UserError, one_line
from experiments.config.identity import run_name
from experiments.config.schema import TrainConfig
from experiments.runs.files import Damaged, load_json, write_json, writing

CHECKPOINT_FILE = "CHECKPOINT.json"  # the last file of a checkpoint's folder: with it, the others are complete
_WAIT_S = 0.1  # how long a new owner waits: longer than ``is_locked`` holds its shared lock
_owned: dict[Path, tuple[int, int]] = {}  # of the folders that this process owns: device and number of the lock's file


class FolderInUse(UserError):
    """A run folder that another process owns."""


class FolderLost(UserError):
    """A run folder that this process owned, and that was removed or replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that owns a run folder."""

    host: str
    pid: int
    job: str  # of SLURM, empty outside of it
    since: str

    def __str__(self) -> str:
        job = f" ({self.job})" if self.job else ""
        return one_line(f"pid {self.pid} on {self.host}{job} since {self.since}")


class _Place:
    """The path of a file in a run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", kind: type | None = None) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, which may not exist yet."""

    path: Path

    config_path = _Place("config.yaml")  # the resolved configuration
    command_path = _Place("command.txt")  # what the user typed, a word a line
    manifest_path = _Place("manifest.json")  # the machine, the software and the data of the run
    steps_path = _Place("steps.jsonl")  # one row per training step
    epochs_path = _Place("epochs.jsonl")  # one row per epoch
    plan_path = _Place("plan.json")  # the plan of the buckets, if the schedule made one
    failure_path = _Place("failure.json")  # the reason of a failure
    log_path = _Place("run.log")  # the output of a run of a sweep
    ranks_path = _Place("ranks")  # the folder of every rank's output
    attempts_path = _Place("attempts")  # the folder of the files of unfinished attempts, numbered from 1
    weights_path = _Place("weights.pt")  # the weights at the end of the run, if they are saved
    checkpoints_path = _Place("checkpoints")  # the folder of the checkpoints
    done_path = _Place("DONE")  # the last file of a finished run: if it exists, all others are complete
    _lock_path = _Place(".lock")
    _owner_path = _Place(".owner.json")

    def is_done(self) -> bool:
        """Return whether the run finished."""
        return self.done_path.exists()

    def config(self) -> dict[str, Any]:
        """Return the configuration as it is in the folder, nested. Raises: Damaged."""
        try:
            found = yaml.safe_load(self.config_path.read_bytes())
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise Damaged(f"{self.config_path} cannot be read: {one_line(error)}") from None
        if not isinstance(found, dict):
            raise Damaged(f"{self.config_path} is not a configuration")
        return found

    def make(self) -> None:
        """Make the folder if it is missing. Raises: CannotWrite."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Own the folder while the context lasts, to carry the run out: rank 0 does so, or a simulated run.

        The manifest of an unfinished attempt, and records without a checkpoint, move to ``attempts/<n>/``. A finished
        run is not changed: look at ``is_done()`` inside the context, because another process may have finished it just
        before. Raises: as ``locked``.
        """
        with self.locked():
            for draft in self.path.glob(".*.tmp"):  # of atomic files, by processes that were killed
                draft.unlink(missing_ok=True)
            if not self.is_done():
                has_checkpoint = any(self.checkpoints_path.glob("step-*"))  # one that is damaged, too
                rows = () if has_checkpoint else (self.steps_path, self.epochs_path)
                self._set_aside(*rows, self.failure_path, self.manifest_path)
            yield

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Own the folder while the context lasts; make it if it is missing. Raises: FolderInUse, CannotWrite."""
        self.make()
        # No soft lock: its file would remain after its owner was killed.
        lock = FileLock(self._lock_path, timeout=_WAIT_S, poll_interval=_WAIT_S / 5, fallback_to_soft=False)
        with writing(self.path):
            try:
                lock.acquire()
            except Timeout:
                raise self.in_use() from None
        try:
            write_json(self._owner_path, asdict(_this_process()))
            _owned[self.path.resolve()] = self._lock_file()
            yield
        finally:
            if _owned.pop(self.path.resolve(), None) == self._lock_file():
                with suppress(OSError):
                    self._owner_path.unlink()
            lock.release()

    def is_locked(self) -> bool:
        """Return whether a process holds the lock at this moment.

        Nothing is written, so this works for folders of other users too; and because this lock is shared, several
        processes can look at once. filelock can do neither.
        """
        try:
            descriptor = os.open(self._lock_path, os.O_RDONLY)
        except OSError:
            return False  # no process has ever owned the folder, or this user may not read the file
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        finally:
            os.close(descriptor)
        return False

    def owner(self) -> Owner | None:
        """Return the last owner of the folder; None after it has given the folder back, or where it is not known."""
        try:
            return Owner(**load_json(self._owner_path))
        except TypeError:
            return None

    def in_use(self) -> FolderInUse:
        """Return the error that another process owns the folder."""
        holder = self.owner() or "another process"
        return FolderInUse(f"run folder {self.path} is in use by {holder}; wait for it, or choose another folder")

    def check_owned(self) -> None:
        """Call this before a file is written that another owner would use. It does nothing where nobody claimed.

        Raises: FolderLost: this process owned the folder, and it was removed or replaced.
        """
        own = _owned.get(self.path.resolve())
        if own and own != self._lock_file():
            raise FolderLost(f"run folder {self.path} was removed: this process stops and writes nothing more there")

    def _lock_file(self) -> tuple[int, int]:
        """Return which file the lock is, (0, 0) where it is gone."""
        try:
            found = self._lock_path.stat()
        except OSError:
            return 0, 0
        return found.st_dev, found.st_ino

    def set_aside_records(self) -> None:
        """Move records and checkpoints, none of which can be used, to ``attempts/<n>/``. Raises: CannotWrite."""
        self._set_aside(self.steps_path, self.epochs_path, self.checkpoints_path)

    def set_aside_ending(self) -> None:
        """Move what a finished run left to ``attempts/<n>/``, DONE first: it starts again. Raises: CannotWrite."""
        records = (self.steps_path, self.epochs_path, self.checkpoints_path, self.plan_path, self.weights_path)
        self._set_aside(self.done_path, *records, self.manifest_path, self.failure_path)

    def next_attempt(self) -> Path:
        """Return the folder for what is set aside next, which does not exist yet."""
        numbers = (int(path.name) for path in self.attempts_path.glob("*") if path.name.isdecimal())
        return self.attempts_path / str(max(numbers, default=0) + 1)

    def _set_aside(self, *paths: Path) -> None:
        self.check_owned()
        if not (found := [path for path in paths if path.exists()]):
            return
        attempt = self.next_attempt()
        with writing(attempt):
            attempt.mkdir(parents=True)
            for path in found:
                path.rename(attempt / path.name)


def folder_of(config: TrainConfig) -> RunFolder:
    """Return the folder of a run, which may not exist yet."""
    return RunFolder(Path(config.output) / run_name(config))


def _this_process() -> Owner:
    job, restart = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):  # a task, as squeue and scancel name it
        job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    again = f", restart {restart}" if restart != "0" else ""
    return Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        job=f"SLURM job {job}{again}" if job else "",
        since=datetime.now(UTC).isoformat(timespec="seconds"),
    )
