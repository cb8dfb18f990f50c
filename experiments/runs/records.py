"""What a run leaves behind, written so that a crash at any moment loses nothing that was recorded.

Rows are JSON lines. A row counts when its newline is in the file: a writer that was killed leaves at most one row
without it, which readers skip and the next writer cuts off. NaN and infinity, which JSON does not have, are written
as ``null``; pandas turns ``null`` in a column of numbers back into NaN. Single files appear whole or not at all.
"""

import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from experiments.config.errors import UserError

Row = dict[str, Any]
CHECKPOINT_FILE = "CHECKPOINT.json"  # the last file of a checkpoint's folder: with it, the others are complete


class RecordError(UserError):
    """A record that cannot be written or read: one line that names the file, what is wrong and what to do."""


class FolderInUse(UserError):
    """A run folder that another process owns."""


class RecordWriter:
    """Append rows to a file of JSON lines, each with a single write.

    Args:
        path: The file; it is made when missing, in a folder that exists. A row that an earlier writer left
            unfinished is cut off.

    Raises:
        RecordError: The file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            _cut_torn_row(self._descriptor)
        except OSError as error:
            raise cannot_write(path, error) from None

    def append(self, row: Mapping[str, Any]) -> None:
        """Write ``row``, whole or not at all.

        Args:
            row: Plain Python values: numbers, strings, booleans, None, lists and dicts of them.

        Raises:
            RecordError: The disk is full, or the file cannot be written for another reason.
            TypeError: A value is not plain, a tensor for instance.
        """
        data = _to_json(row).encode() + b"\n"
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            raise cannot_write(self.path, error) from None
        if written < len(data):
            self._take_back(written)
            raise cannot_write(self.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def sync(self) -> None:
        """Have the rows on the disk, so that not even a loss of power takes them.

        Raises:
            RecordError: The disk is full.
        """
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def close(self) -> None:
        """Close the file. Rows are in the operating system's hands already, so a missing close loses none."""
        os.close(self._descriptor)

    def _take_back(self, num_bytes: int) -> None:
        with suppress(OSError):
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - num_bytes)

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_records(path: Path) -> list[Row]:
    """Return the rows of a file of JSON lines; a last row without its newline is skipped.

    Raises:
        RecordError: The file cannot be read, or a line that was finished is not a JSON object.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read records: {path}: {reason(error)}") from None
    finished = data.split(b"\n")[:-1]
    return [_parse_row(line, path, number) for number, line in enumerate(finished, start=1)]


def write_atomic(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader, or a crash, sees the old file or the whole new one.

    Raises:
        RecordError: The file cannot be written; nothing is left of the attempt.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _write_to_disk(draft, text)
        os.replace(draft, path)
        flush_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise cannot_write(path, error) from None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` to ``path`` as one JSON document, like ``write_atomic``; NaN and infinity become ``null``.

    Raises:
        RecordError: The file cannot be written.
        TypeError: A value is not plain.
    """
    write_atomic(path, _to_json(value, indent=2) + "\n")


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run and the names of what stands in it."""

    path: Path

    @property
    def config_path(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def manifest_path(self) -> Path:
        """Where the run took place, and with what."""
        return self.path / "manifest.json"

    @property
    def steps_path(self) -> Path:
        """One row per training step."""
        return self.path / "steps.jsonl"

    @property
    def epochs_path(self) -> Path:
        """One row per epoch."""
        return self.path / "epochs.jsonl"

    @property
    def plan_path(self) -> Path:
        """Which parameters shared a bucket, where that was planned."""
        return self.path / "plan.json"

    @property
    def failure_path(self) -> Path:
        """Why the run failed, if it did."""
        return self.path / "failure.json"

    @property
    def ranks_path(self) -> Path:
        """The folder of every rank's output."""
        return self.path / "ranks"

    @property
    def errors_path(self) -> Path:
        """The folder of the errors that ranks reported."""
        return self.path / "errors"

    @property
    def attempts_path(self) -> Path:
        """The folder of what unfinished attempts left behind, numbered from 1."""
        return self.path / "attempts"

    @property
    def weights_path(self) -> Path:
        """The weights that the run ended with, where they are kept."""
        return self.path / "weights.pt"

    @property
    def checkpoints_path(self) -> Path:
        """The folder of what the run can go on from."""
        return self.path / "checkpoints"

    @property
    def done_path(self) -> Path:
        """The last file of a finished run: its presence says that all others are complete."""
        return self.path / "DONE"

    def is_done(self) -> bool:
        """Return whether the run finished."""
        return self.done_path.exists()

    def mark_done(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary`` as the run's last file.

        Raises:
            RecordError: The file cannot be written.
        """
        write_json(self.done_path, summary)

    @contextmanager
    def claim(self) -> Iterator[Path | None]:
        """Own the folder for the length of the context; make it when missing.

        What an unfinished attempt recorded moves to ``attempts/<n>/``, so that no attempt mixes with the next;
        configuration and checkpoints stay. Where there is a checkpoint the rows of steps and epochs stay too, for
        ``rewind`` to take them back to the checkpoint that the run goes on from. A finished run is left as it is: ask
        ``is_done()`` inside the claim, because another process may have finished it just before.

        Yields:
            The folder that the earlier attempt was moved to, or None when there was none.

        Raises:
            FolderInUse: Another process owns it.
            UserError: The folder cannot be made or written.
        """
        descriptor = self._lock()
        try:
            yield None if self.is_done() else self._put_aside()
        finally:
            os.close(descriptor)  # this also gives the lock back, as the death of the process would

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Own the folder as it is for the length of the context, so that no run starts in it. Raises: as ``claim``."""
        descriptor = self._lock()
        try:
            yield
        finally:
            os.close(descriptor)

    def rewind(self, step: int) -> Path | None:
        """Take the records back to the moment when ``step`` steps were done; 0 takes them back to the start.

        Later rows of steps and epochs move to ``attempts/<n>/``: to what ``claim`` put aside of the same attempt, or
        else to a new one. A crash on the way leaves each file as it was or as it should be.

        Returns:
            The folder that rows were moved to, or None when there were no later ones.

        Raises:
            RecordError: A file cannot be read or written, or a row is not a record.
        """
        later = {
            self.steps_path: _find_later(self.steps_path, lambda index: index >= step),
            self.epochs_path: _find_later(self.epochs_path, lambda num_done: num_done > step or step == 0),
        }
        moving = {path: start for path, start in later.items() if start is not None}
        if not moving:
            return None
        try:
            attempt = self._attempt_without_rows()
        except OSError as error:
            raise cannot_write(self.attempts_path, error) from None
        for path, start in moving.items():
            _move_tail(path, start, attempt / path.name)
        return attempt

    def _lock(self) -> int:
        made = _make_folder(self.path)
        try:
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            _remove_folders(made)
            raise _cannot_use(self.path, error) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise _cannot_use(self.path, error) from None
            message = f"run folder {self.path} is in use by another process; wait for it, or choose another folder"
            raise FolderInUse(message) from None
        return descriptor

    def _put_aside(self) -> Path | None:
        rows = () if self._has_checkpoint() else (self.steps_path, self.epochs_path)
        per_attempt = (*rows, self.ranks_path, self.errors_path, self.failure_path, self.manifest_path)
        leavings = [path for path in per_attempt if path.exists()]
        if not leavings:
            return None
        try:
            attempt = self._next_attempt()
            for path in leavings:
                path.rename(attempt / path.name)
        except OSError as error:
            raise _cannot_use(self.path, error) from None
        return attempt

    def _has_checkpoint(self) -> bool:
        return any(self.checkpoints_path.glob(f"step-*/{CHECKPOINT_FILE}"))

    def _next_attempt(self) -> Path:
        self.attempts_path.mkdir(exist_ok=True)
        attempt = self.attempts_path / str(self._last_attempt() + 1)
        attempt.mkdir()
        return attempt

    def _last_attempt(self) -> int:
        taken = (int(folder.name) for folder in self.attempts_path.iterdir() if folder.name.isdecimal())
        return max(taken, default=0)

    def _attempt_without_rows(self) -> Path:
        """The newest attempt where its rows stayed behind when it was put aside, or else a new one."""
        self.attempts_path.mkdir(exist_ok=True)
        newest = self.attempts_path / str(self._last_attempt())
        has_rows = any((newest / path.name).exists() for path in (self.steps_path, self.epochs_path))
        return newest if newest.exists() and not has_rows else self._next_attempt()


def _to_json(value: Mapping[str, Any], indent: int | None = None) -> str:
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:  # json's word for NaN or infinity
        return json.dumps(_without_nan(value), allow_nan=False, indent=indent)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value


def _parse_row(line: bytes, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if isinstance(row, dict):
        return row
    raise RecordError(f"{path}, line {number} is not a record; remove the line, or run again")


def _find_later(path: Path, is_later: Callable[[int], bool]) -> int | None:
    """Return where the first row starts whose ``step`` is later, or a last row without its newline."""
    try:
        with path.open("rb") as file:
            return _offset_of_later(file, path, is_later)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"cannot read records: {path}: {reason(error)}") from None


def _offset_of_later(file: BinaryIO, path: Path, is_later: Callable[[int], bool]) -> int | None:
    start, num_rows = 0, 0
    while block := file.readlines(1 << 20):  # whole rows; steps ascend, so the last row of a block speaks for it
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
    step = _parse_row(line, path, number).get("step")
    if isinstance(step, int):
        return step
    raise RecordError(f"{path}, line {number} has no step; remove the line, or run again")


def _move_tail(path: Path, start: int, destination: Path) -> None:
    """Move the bytes from ``start`` on to another file: they are on the disk there before they go here."""
    draft = destination.with_name(f".{destination.name}.tmp")  # a folder has one owner: the next one writes over it
    try:
        with path.open("r+b") as source, draft.open("wb") as copy:
            source.seek(start)
            shutil.copyfileobj(source, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())
            os.replace(draft, destination)
            flush_folder(destination.parent)
            source.truncate(start)
            os.fsync(source.fileno())
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise cannot_write(destination, error) from None


def _cut_torn_row(descriptor: int, *, block: int = 1 << 16) -> None:
    """Shorten the file to the end of its last finished row."""
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


def _write_to_disk(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Make a rename inside the folder survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(path: Path) -> list[Path]:
    """Make a folder and its parents; return those that were missing, the deepest first."""
    missing: list[Path] = []
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _remove_folders(missing)
        raise _cannot_use(path, error) from None
    return missing


def _remove_folders(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # never made, or something stands in it
            folder.rmdir()


def reason(error: OSError) -> str:
    """Return in lower case what the operating system says about an error."""
    return (error.strerror or str(error)).lower()


def cannot_write(path: Path, error: OSError) -> RecordError:
    """Return the one line that tells that ``path`` cannot be written, why, and what to do."""
    remedy = "free space" if error.errno == errno.ENOSPC else "choose a folder that can be written"
    return RecordError(f"cannot write {path}: {reason(error)}; {remedy} and start the run again")


def _cannot_use(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot use run folder {path}: {reason(error)}; choose a folder that can be written")
