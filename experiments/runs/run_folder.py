"""The folder of one run: the names of its files, its lock, and the files of unfinished attempts."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from experiments.config.identity import run_name
from experiments.config.schema import TrainConfig
from experiments.runs.atomic_files import cannot_write, remove_drafts
from experiments.runs.lock import Owner, check_owned, is_locked, lock_folder, make_folder, owner_of

CHECKPOINT_FILE = "CHECKPOINT.json"  # the last file of a checkpoint's folder: with it, the others are complete


class _Place:
    """The path of a file in a run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", kind: type | None = None) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run and the names of its files."""

    path: Path

    config_path = _Place("config.yaml")  # the resolved configuration
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

    def is_done(self) -> bool:
        """Return whether the run finished."""
        return self.done_path.exists()

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Own the folder while the context lasts; make it if it is missing. Rank 0 does so, or a simulated run.

        The manifest of an unfinished attempt, and records without a checkpoint, move to ``attempts/<n>/``. A finished
        run is not changed: look at ``is_done()`` inside the context, because another process may have finished it just
        before.

        Raises:
            FolderInUse: another process owns it.
            CannotWrite: the folder cannot be made or written.
        """
        with self.locked():
            remove_drafts(self.path)
            if not self.is_done():
                has_checkpoint = any(self.checkpoints_path.glob("step-*"))  # one that is damaged, too
                rows = () if has_checkpoint else (self.steps_path, self.epochs_path)
                self._set_aside(*rows, self.failure_path, self.manifest_path)
            yield

    def locked(self) -> AbstractContextManager[None]:
        """Own the folder while a context lasts and change nothing, so that no run starts. Raises: as ``claim``."""
        return lock_folder(self.path)

    def make(self) -> None:
        """Make the folder if it is missing. Raises: CannotWrite."""
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
        """Move records and checkpoints, none of which can be used, to ``attempts/<n>/``. Raises: CannotWrite."""
        self._set_aside(self.steps_path, self.epochs_path, self.checkpoints_path)

    def set_aside_ending(self) -> None:
        """Move what a finished run left to ``attempts/<n>/``, DONE first: it starts again. Raises: CannotWrite."""
        records = (self.steps_path, self.epochs_path, self.checkpoints_path, self.plan_path, self.weights_path)
        self._set_aside(self.done_path, *records, self.manifest_path, self.failure_path)

    def _set_aside(self, *paths: Path) -> None:
        """Move files and folders, those that there are, to the folder of a new attempt."""
        self.check_owned()
        found = [path for path in paths if path.exists()]
        if not found:
            return
        try:
            self.attempts_path.mkdir(exist_ok=True)
            numbers = (int(path.name) for path in self.attempts_path.iterdir() if path.name.isdecimal())
            attempt = self.attempts_path / str(max(numbers, default=0) + 1)
            attempt.mkdir()
            for path in found:
                path.rename(attempt / path.name)
        except OSError as error:
            raise cannot_write(self.attempts_path, error) from None


def folder_of(config: TrainConfig) -> RunFolder:
    """Return the folder of a run, which may not exist yet."""
    return RunFolder(Path(config.output) / run_name(config))
