"""The folder of one run: the names of its files, its lock, and the files of unfinished attempts."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config.identity import run_name
from experiments.config.schema import TrainConfig
from experiments.runs.atomic_files import cannot_write, remove_drafts, write_atomic, write_json
from experiments.runs.folder_lock import FolderInUse, cannot_use, follow_owner, is_locked, lock_folder, owner_of
from experiments.runs.lease import Lease, check_lease
from experiments.runs.owner import Owner
from experiments.runs.rewinding import Records, move_tail, readable_lines, replace_by_copy, rows_before, whole_end

CHECKPOINT_FILE = "CHECKPOINT.json"  # the last file of a checkpoint's folder: with it, the others are complete


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run and the names of its files."""

    path: Path

    @property
    def config_path(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def manifest_path(self) -> Path:
        """The machine, the software and the data of the run."""
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
        """The plan of the buckets, if the schedule made one."""
        return self.path / "plan.json"

    @property
    def failure_path(self) -> Path:
        """The reason of a failure."""
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
        """The folder of the files of unfinished attempts, numbered from 1."""
        return self.path / "attempts"

    @property
    def weights_path(self) -> Path:
        """The weights at the end of the run, if they are saved."""
        return self.path / "weights.pt"

    @property
    def checkpoints_path(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def done_path(self) -> Path:
        """The last file of a finished run: if it exists, all others are complete."""
        return self.path / "DONE"

    def is_done(self) -> bool:
        """Return whether the run finished."""
        return self.done_path.exists()

    def mark_done(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary`` as the run's last file.

        Raises:
            RecordError: The file cannot be written.
            LeaseLost: This process no longer owns the folder.
        """
        self.check_owned()
        write_json(self.done_path, summary)

    @contextmanager
    def claim(self, *, launch: str | None = None) -> Iterator[Path | None]:
        """Own the folder while the context lasts; make it if it is missing.

        The records of an unfinished attempt move to ``attempts/<n>/``, so that they do not mix with the next attempt's.
        Configuration and checkpoints stay. If there is a checkpoint, the rows of steps and epochs stay too, and
        ``rewind`` shortens them to the step at which the run resumes. A finished run is not changed: call ``is_done()``
        inside the context, because another process may have finished the run just before.

        Args:
            launch: For a run of several nodes, see ``lock_folder``.

        Yields:
            The folder to which the earlier attempt was moved, None if there was none.

        Raises:
            FolderInUse: Another process owns it.
            LeaseLost: In the main thread, at any moment: another process has taken over, because this one stood still.
            UserError: The folder cannot be made or written.
        """
        with lock_folder(self.path, launch=launch) as lease:
            if lease.succeeds_stray and not self.is_done():
                self._keep_rows_from_stray()
            for folder in (self.path, self.errors_path, *self.ranks_path.glob("rank*")):
                remove_drafts(folder)
            yield None if self.is_done() else self._archive_attempt()

    def follow(self, error: FolderInUse) -> AbstractContextManager[None]:
        """Work, while the context lasts, for the node of the same launch that owns the folder.

        Raises:
            LeaseLost: In the main thread, at any moment: that node lost the folder to another launch.
        """
        assert error.entry is not None
        return follow_owner(self.path, error.entry).kept()

    def locked(self) -> AbstractContextManager[Lease]:
        """Own the folder while a context lasts and change nothing, so that no run starts. Raises: as ``claim``."""
        return lock_folder(self.path)

    def check_owned(self) -> None:
        """Call this before a file is written that another owner would use. It does nothing where nobody claimed.

        Raises:
            LeaseLost: This process, or the launcher that started it, owned the folder and does so no longer.
        """
        check_lease(self.path)

    def owner(self) -> Owner | None:
        """Return the owner of a folder that is locked, None if it is unknown."""
        return owner_of(self.path)

    def is_locked(self) -> bool:
        """Return whether a process owns the folder at this moment."""
        return is_locked(self.path)

    def check_rows(self, step: int, records: Records | None) -> dict[Path, int]:
        """Return where the rows of the first ``step`` steps end in each file, in bytes; they are whole.

        Args:
            records: What a checkpoint of that step holds of them; None for one of an earlier version.

        Raises:
            DamagedRows: A row of them is missing or damaged.
            RecordError: A file cannot be read.
        """
        steps, epochs = rows_before(self.steps_path, self.epochs_path, step, records)
        return {self.steps_path: steps.end, self.epochs_path: epochs.end}

    def rewind(self, ends: Mapping[Path, int] | None = None) -> Path | None:
        """Rewind the records to an earlier moment, given by what ``check_rows`` returned; None removes all rows.

        Later rows of steps and epochs move to ``attempts/<n>/``: to the folder of the attempt that ``claim`` moved, or
        else to a new one. After a crash each file is either unchanged or complete.

        Returns:
            The folder to which rows were moved, None if there were no later rows.

        Raises:
            RecordError: A file cannot be read or written.
            LeaseLost: This process no longer owns the folder.
        """
        self.check_owned()
        found = {path: (ends or {}).get(path, 0) for path in (self.steps_path, self.epochs_path) if path.exists()}
        moving = {path: end for path, end in found.items() if end < path.stat().st_size}
        if not moving:
            return None
        try:
            attempt = self._archive_for_rows()
        except OSError as error:
            raise cannot_write(self.attempts_path, error) from None
        for path, start in moving.items():
            move_tail(path, start, attempt / path.name)
        return attempt

    def set_aside_checkpoints(self) -> None:
        """Move the checkpoints, none of which can be used, to ``attempts/<n>/``. Raises: as ``rewind``."""
        self._set_aside([self.checkpoints_path])

    def set_aside_ending(self) -> None:
        """Move what a finished run left to ``attempts/<n>/``, DONE first: it starts again. Raises: as ``rewind``."""
        files = (self.done_path, self.steps_path, self.epochs_path, self.plan_path, self.weights_path)
        attempt = (self.manifest_path, self.ranks_path, self.errors_path, self.failure_path, self.checkpoints_path)
        self._set_aside([*files, *attempt])

    def keep_readable_rows(self, step: int, records: Records | None) -> set[Path]:
        """Keep what can be read of the rows of the first ``step`` steps; damaged files move to ``attempts/<n>/``.

        Args:
            records: As for ``check_rows``.

        Returns:
            The files that were damaged: the next row does not follow their last one.

        Raises:
            RecordError: A file cannot be read or written.
            LeaseLost: This process no longer owns the folder.
        """
        self.check_owned()
        ends, torn = {}, set()
        for path, kind, last in ((self.steps_path, "steps", step - 1), (self.epochs_path, "epochs", step)):
            end = whole_end(path, last, records[kind] if records else None, is_complete=kind == "steps")
            if end is None:
                torn.add(path)
                kept = readable_lines(path, last_step=last)
                self._set_aside([path])
                write_atomic(path, kept)
                end = len(kept.encode())
            ends[path] = end
        self.rewind(ends)
        return torn

    def _set_aside(self, paths: Iterable[Path]) -> None:
        self.check_owned()
        found = [path for path in paths if path.exists()]
        if not found:
            return
        try:
            attempt = self._next_attempt()
            for path in found:
                path.rename(attempt / path.name)
        except OSError as error:
            raise cannot_write(self.attempts_path, error) from None

    def _keep_rows_from_stray(self) -> None:
        """Replace the files of rows by copies: a process of the earlier owner that goes on appends to the old ones."""
        for path in (self.steps_path, self.epochs_path):
            if path.exists():
                replace_by_copy(path)

    def _archive_attempt(self) -> Path | None:
        rows = () if self._has_checkpoint() else (self.steps_path, self.epochs_path)
        per_attempt = (*rows, self.ranks_path, self.errors_path, self.failure_path, self.manifest_path)
        found = [path for path in per_attempt if path.exists()]
        if not found:
            return None
        try:
            attempt = self._next_attempt()
            for path in found:
                path.rename(attempt / path.name)
        except OSError as error:
            raise cannot_use(self.path, error) from None
        return attempt

    def _has_checkpoint(self) -> bool:
        return any(path.is_dir() for path in self.checkpoints_path.glob("step-*"))  # one that is damaged, too

    def _next_attempt(self) -> Path:
        self.attempts_path.mkdir(exist_ok=True)
        attempt = self.attempts_path / str(self._last_attempt() + 1)
        attempt.mkdir()
        return attempt

    def _last_attempt(self) -> int:
        taken = (int(folder.name) for folder in self.attempts_path.iterdir() if folder.name.isdecimal())
        return max(taken, default=0)

    def _archive_for_rows(self) -> Path:
        """Return the folder of the newest attempt if it has no rows yet, or else a new one."""
        self.attempts_path.mkdir(exist_ok=True)
        newest = self.attempts_path / str(self._last_attempt())
        has_rows = any((newest / path.name).exists() for path in (self.steps_path, self.epochs_path))
        return newest if newest.exists() and not has_rows else self._next_attempt()


def folder_of(config: TrainConfig) -> RunFolder:
    """Return the folder of a run, which may not exist yet."""
    return RunFolder(Path(config.output) / run_name(config))
