"""Checkpoints: the state of every rank on disk, complete or absent.

A checkpoint is a folder with ``rank<r>.pt`` of each rank, as torch.save writes it, and ``CHECKPOINT.json``, which holds
the size and SHA-256 of each of them, and the length and SHA-256 of each record at that moment. It is written as a
hidden draft and gets its name by a single rename when all of it is on the disk. So a crash at any moment leaves earlier
checkpoints as they were, and at most a draft that the next one removes. Nothing here communicates with other ranks:
rank 0 begins, all ranks write their files (rank_files.py), rank 0 publishes.
"""

import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from experiments.config.errors import UserError
from experiments.runs.atomic_files import (
    Digest,
    cannot_write,
    flush_folder,
    parse_json,
    write_json,
)
from experiments.runs.disks import reason
from experiments.runs.records import Extent
from experiments.runs.run_folder import CHECKPOINT_FILE, RunFolder

_DRAFT, _OLD = ".draft-", ".old-"  # prefixes of folders that are not yet, or no longer, checkpoints


class DamagedCheckpoint(UserError):
    """A checkpoint with a missing or damaged file; an earlier checkpoint may still be complete."""


def damaged(path: Path, what: str) -> DamagedCheckpoint:
    """Return the error that names the file of a checkpoint that cannot be used, and the reason."""
    return DamagedCheckpoint(f"cannot use checkpoint {path.parent}: {path.name}: {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was published.

    Args:
        path: Its folder.
        step: Steps done when it was saved, which is the number of the next step.
        ranks: The file of each rank.
        records: What was recorded until then, by the name of the file.
    """

    path: Path
    step: int
    ranks: Sequence[Digest]
    records: Mapping[str, Extent] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Number of its ranks."""
        return len(self.ranks)

    def check(self, folder: RunFolder) -> None:
        """Check the sizes of its files, and that the run's records begin as they were.

        Raises:
            UserError: something is missing or damaged.
        """
        for rank, digest in enumerate(self.ranks):
            path = rank_path(self.path, rank)
            if not path.exists() or path.stat().st_size != digest.bytes:
                raise damaged(path, f"missing, or not {digest.bytes} bytes long")
        for name, extent in self.records.items():
            extent.check(folder.path / name)


def begin(folder: RunFolder, step: int) -> Path:
    """Make the draft folder for the files of all ranks, and remove drafts that a crash left; rank 0 calls this.

    Raises:
        UserError: It cannot be made.
    """
    draft = folder.checkpoints_path / f"{_DRAFT}{_name(step)}-{secrets.token_hex(4)}"
    try:
        folder.checkpoints_path.mkdir(exist_ok=True)
        flush_folder(folder.path)
        _remove_drafts(folder)
        draft.mkdir()
    except OSError as error:
        raise cannot_write(draft, error) from None
    return draft


def publish(
    folder: RunFolder,
    draft: Path,
    step: int,
    ranks: Sequence[Digest],
    records: Mapping[str, Extent],
    *,
    keep: int = 2,
) -> Checkpoint:
    """Make the draft a checkpoint and remove all but the newest; rank 0 calls this when all ranks have written.

    Args:
        ranks: What ``write_rank`` returned on each rank, in the order of ranks.
        records: What is on the disk of each record.
        keep: How many checkpoints remain, this one included.

    Raises:
        UserError: It cannot be written, or a rank's file is not on this disk.
    """
    path = folder.checkpoints_path / _name(step)
    for rank, digest in enumerate(ranks):
        own = rank_path(draft, rank)
        if not own.exists() or own.stat().st_size != digest.bytes:
            remedy = "put the run's folder on a disk that all nodes share"
            raise UserError(f"the file that rank {rank} wrote of a checkpoint is not at {own}; {remedy}")
    description = {
        "step": step,
        "ranks": [digest._asdict() for digest in ranks],
        "records": {name: extent._asdict() for name, extent in records.items()},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_json(draft / CHECKPOINT_FILE, description)
    try:
        draft.rename(path)
        flush_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from None
    for older in _published(folder)[keep:]:
        _remove(older)
    return Checkpoint(path=path, step=step, ranks=ranks, records=records)


def discard(draft: Path) -> None:
    """Remove a draft that will not be published, because a rank could not write its file."""
    shutil.rmtree(draft, ignore_errors=True)


def usable(folder: RunFolder) -> tuple[list[Checkpoint], list[str]]:
    """Return the checkpoints with which the run can resume, newest first, and one line for each of the others.

    Their files are there, and the records until then are whole. The content of a rank's file is verified by its reader.
    """
    found, problems = [], []
    for path in _published(folder):
        try:
            checkpoint = describe(path)
            checkpoint.check(folder)
        except UserError as error:
            problems.append(str(error))
        else:
            found.append(checkpoint)
    return found, problems


def describe(path: Path) -> Checkpoint:
    """Return what the folder of a checkpoint says of itself. Raises: DamagedCheckpoint: it is missing or damaged."""
    try:
        value = parse_json((path / CHECKPOINT_FILE).read_bytes())
        return Checkpoint(
            path=path,
            step=int(value["step"]),
            ranks=[Digest(int(rank["bytes"]), str(rank["sha256"])) for rank in value["ranks"]],
            records={name: Extent.parse(extent) for name, extent in value["records"].items()},
        )
    except OSError as error:
        raise damaged(path / CHECKPOINT_FILE, reason(error)) from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise damaged(path / CHECKPOINT_FILE, "not the description of a checkpoint") from None


def open_checkpoint(path: Path) -> Checkpoint:
    """Return a checkpoint of any run: the newest of a run's folder, or the one whose folder ``path`` is.

    Raises:
        UserError: There is none.
    """
    if (path / CHECKPOINT_FILE).exists():
        return describe(path)
    problem = ""
    for each in _published(RunFolder(path)):
        try:
            return describe(each)
        except UserError as error:
            problem = problem or str(error)
    if not problem and RunFolder(path).is_done():
        problem = f"{path} has finished, and a finished run has no checkpoint; name a run that was stopped"
    wanted = "give the folder of a run, or one of the folders in its checkpoints/"
    raise UserError(
        problem or (f"no checkpoint in {path}; {wanted}" if path.exists() else f"no folder {path}; {wanted}")
    )


def remove_after(folder: RunFolder, step: int) -> None:
    """Remove the checkpoints of steps after ``step``, from which the run resumes and which it will write again.

    Raises:
        UserError: One cannot be removed.
    """
    for path in _published(folder):
        if path.name > _name(step):
            _remove(path)


def remove_all(folder: RunFolder) -> None:
    """Remove the checkpoints of a finished run. Raises: UserError: One cannot be removed."""
    for path in _published(folder):
        _remove(path)
    _remove_drafts(folder)
    with suppress(OSError):  # never made, or not empty
        folder.checkpoints_path.rmdir()


def rank_path(checkpoint: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return checkpoint / f"rank{rank}.pt"


def _name(step: int) -> str:
    return f"step-{step:09d}"


def _published(folder: RunFolder) -> list[Path]:
    """Return the folders of checkpoints, whether they can be read or not, newest first."""
    return sorted((path for path in folder.checkpoints_path.glob("step-*") if path.is_dir()), reverse=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that a crash leaves no incomplete one under its name."""
    old = path.with_name(f"{_OLD}{path.name}")
    try:
        path.rename(old)
    except OSError as error:
        raise cannot_write(path, error) from None
    shutil.rmtree(old, ignore_errors=True)  # ``begin`` removes what is left


def _remove_drafts(folder: RunFolder) -> None:
    for pattern in (f"{_DRAFT}*", f"{_OLD}*"):
        for path in folder.checkpoints_path.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
