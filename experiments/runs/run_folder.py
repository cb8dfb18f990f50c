"""The folder of one run: the names of its files, its lock, and the files of unfinished attempts."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config.identity import run_name
from experiments.config.schema import TrainConfig
from experiments.runs.atomic_files import remove_drafts, write_json
from experiments.runs.lock import Owner, cannot_use, check_owned, is_locked, lock_folder, make_folder, owner_of

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
            FolderLost: This process no longer owns the folder.
        """
        self.check_owned()
        write_json(self.done_path, summary)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Own the folder while the context lasts; make it if it is missing. Rank 0 does so, or a simulated run.

        The manifest of an unfinished attempt, and records without a checkpoint, move to ``attempts/<n>/``. A finished
        run is not changed: look at ``is_done()`` inside the context, because another process may have finished it just
        before.

        Raises:
            FolderInUse: another process owns it.
            UserError: the folder cannot be made or written.
        """
        with self.locked():
            remove_drafts(self.path)
            if not self.is_done():
                rows = () if self._has_checkpoint() else (self.steps_path, self.epochs_path)
                self.set_aside(*rows, self.failure_path, self.manifest_path)
            yield

    def locked(self) -> AbstractContextManager[None]:
        """Own the folder while a context lasts and change nothing, so that no run starts. Raises: as ``claim``."""
        return lock_folder(self.path)

    def make(self) -> None:
        """Make the folder if it is missing. Raises: UserError: it cannot be made."""
        make_folder(self.path)

    def check_owned(self) -> None:
        """Call this before a file is written that another owner would use. It does nothing where nobody claimed.

        Raises:
            FolderLost: this process owned the folder and does so no longer.
        """
        check_owned(self.path)

    def owner(self) -> Owner | None:
        """Return the last owner of the folder; None after it has given the folder back."""
        return owner_of(self.path)

    def is_locked(self) -> bool:
        """Return whether a process owns the folder at this moment."""
        return is_locked(self.path)

    def set_aside_records(self) -> None:
        """Move records and checkpoints, none of which can be used, to ``attempts/<n>/``. Raises: as ``set_aside``."""
        self.set_aside(self.steps_path, self.epochs_path, self.checkpoints_path)

    def set_aside_ending(self) -> None:
        """Move what a finished run left to ``attempts/<n>/``, DONE first: it starts again. Raises: as ``set_aside``."""
        records = (self.steps_path, self.epochs_path, self.checkpoints_path, self.plan_path, self.weights_path)
        self.set_aside(self.done_path, *records, self.manifest_path, self.failure_path)

    def set_aside(self, *paths: Path) -> None:
        """Move files and folders to that of the newest attempt, ``attempts/<n>/``, or a new one where it has such.

        Raises:
            UserError: one cannot be moved.
            FolderLost: this process no longer owns the folder.
        """
        self.check_owned()
        found = [path for path in paths if path.exists()]
        if not found:
            return
        try:
            attempt = self._attempt_without(found)
            for path in found:
                path.rename(attempt / path.name)
        except OSError as error:
            raise cannot_use(self.path, error) from None

    def _attempt_without(self, paths: Iterable[Path]) -> Path:
        """Return the folder of the newest attempt, or a new one if that has files of these names."""
        self.attempts_path.mkdir(exist_ok=True)
        last = self._last_attempt()
        newest = self.attempts_path / str(last)
        if not last or any((newest / path.name).exists() for path in paths):
            newest = self.attempts_path / str(last + 1)
            newest.mkdir()
        return newest

    def _has_checkpoint(self) -> bool:
        return any(path.is_dir() for path in self.checkpoints_path.glob("step-*"))  # one that is damaged, too

    def _last_attempt(self) -> int:
        taken = (int(folder.name) for folder in self.attempts_path.iterdir() if folder.name.isdecimal())
        return max(taken, default=0)


def folder_of(config: TrainConfig) -> RunFolder:
    """Return the folder of a run, which may not exist yet."""
    return RunFolder(Path(config.output) / run_name(config))
