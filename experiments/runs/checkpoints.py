"""Checkpoints: the state of every rank on disk, complete or absent.

A checkpoint is a folder with ``rank<r>.pt`` of each rank, written by torch.save, and ``CHECKPOINT.json`` with the size
and SHA-256 of each file and of each record at that time. It is written as a hidden draft and renamed when it is
completely on disk. So a crash leaves earlier checkpoints intact, and at most a draft that the next one removes. Nothing
here communicates: rank 0 begins, all ranks write their files (rank_files.py), rank 0 publishes.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config.errors import UserError
from experiments.runs.files import Damaged, Digest, flush_folder, load_json, write_json, writing
from experiments.runs.run_folder import CHECKPOINT_FILE, RunFolder

_DRAFT = ".draft-"  # prefix of folders that are not yet, or no longer, checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was published: its folder, and what that says of itself."""

    path: Path
    step: int  # steps done when it was saved, which is the number of the next step
    epoch: int  # epochs done
    ranks: Sequence[Digest]  # what each rank has written
    records: Mapping[str, Digest]  # what was recorded until then, by the name of the file

    @property
    def world_size(self) -> int:
        """Number of its ranks."""
        return len(self.ranks)

    def rank_path(self, rank: int) -> Path:
        """Return the file of a rank."""
        return rank_path(self.path, rank)


def rank_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank in the folder of a checkpoint or of its draft."""
    return folder / f"rank{rank}.pt"


def begin(folder: RunFolder) -> Path:
    """Make the draft folder for the files of all ranks, and remove drafts that a crash left. Raises: CannotWrite."""
    draft = folder.checkpoints_path / f"{_DRAFT}new"
    with writing(folder.checkpoints_path):
        _remove_drafts(folder)
        draft.mkdir(parents=True)
        flush_folder(folder.path)
    return draft


def publish(
    folder: RunFolder,
    draft: Path,
    step: int,
    ranks: Sequence[Digest],
    records: Mapping[str, Digest],
    *,
    epoch: int,
    keep: int = 2,
) -> Checkpoint:
    """Make the draft a checkpoint and remove all but the newest ``keep``, when all ranks have written.

    Raises: UserError: it cannot be written, or a rank's file is not on this disk.
    """
    for rank in range(len(ranks)):
        if not rank_path(draft, rank).exists():
            remedy = "put the run's folder on a disk that all nodes share"
            raise UserError(f"what rank {rank} wrote of a checkpoint is not at {rank_path(draft, rank)}; {remedy}")
    written = {name: digest._asdict() for name, digest in records.items()}
    digests = [digest._asdict() for digest in ranks]
    write_json(draft / CHECKPOINT_FILE, {"step": step, "epoch": epoch, "ranks": digests, "records": written})
    path = folder.checkpoints_path / _name(step)
    with writing(path):
        draft.rename(path)
        flush_folder(path.parent)
        for older in published(folder)[keep:]:
            _remove(older)
    return Checkpoint(path=path, step=step, epoch=epoch, ranks=ranks, records=records)


def published(folder: RunFolder) -> list[Path]:
    """Return the folders of checkpoints, whether they can be read or not, newest first."""
    return sorted((path for path in folder.checkpoints_path.glob("step-*") if path.is_dir()), reverse=True)


def usable(folder: RunFolder) -> tuple[list[Checkpoint], list[str]]:
    """Return the checkpoints with which the run can resume, newest first, and one line for each of the others.

    Their files are there, and the records until then are whole. The content of a rank's file is verified by its reader.
    """
    found, problems = [], []
    for path in published(folder):
        try:
            checkpoint = describe(path)
            for name, digest in checkpoint.records.items():
                digest.check(folder.path / name, begins=True)
            for rank, digest in enumerate(checkpoint.ranks):
                file = checkpoint.rank_path(rank)
                if not file.exists() or file.stat().st_size != digest.bytes:
                    raise Damaged(f"{file} is missing, or not {digest.bytes} bytes long")
        except UserError as error:
            problems.append(str(error))
        else:
            found.append(checkpoint)
    return found, problems


def describe(path: Path) -> Checkpoint:
    """Return what the folder of a checkpoint says of itself. Raises: Damaged."""

    def digest(given: Mapping[str, Any]) -> Digest:
        return Digest(int(given["bytes"]), str(given["sha256"]))

    value = load_json(path / CHECKPOINT_FILE)
    try:
        return Checkpoint(
            path=path,
            step=int(value["step"]),
            epoch=int(value["epoch"]),
            ranks=[digest(given) for given in value["ranks"]],
            records={name: digest(given) for name, given in value["records"].items()},
        )
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        raise Damaged(f"{path / CHECKPOINT_FILE} is missing, or does not describe a checkpoint") from None


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the newest checkpoint of a run's folder, or the one whose folder ``path`` is. Raises: UserError: none."""
    problem = ""
    for each in [path] if (path / CHECKPOINT_FILE).exists() else published(RunFolder(path)):
        try:
            return describe(each)
        except UserError as error:
            problem = problem or str(error)
    if not problem and RunFolder(path).is_done():
        problem = f"{path} has finished, and kept no checkpoint (checkpoint.at_end); name a run that was stopped"
    missing = f"no checkpoint in {path}; give the folder of a run, or one of the folders in its checkpoints/"
    raise UserError(problem or missing)


def remove_after(folder: RunFolder, step: int) -> None:
    """Remove drafts, and the checkpoints of steps after ``step``. Raises: CannotWrite."""
    for path in published(folder):
        if path.name > _name(step):
            with writing(path):
                _remove(path)
    _remove_drafts(folder)


def leftovers(folder: RunFolder) -> list[Path]:
    """Return the checkpoints and drafts of a finished run, without the checkpoint of its end."""
    end = _name(load_json(folder.done_path).get("step", -1))
    return [path for path in (*published(folder), *_drafts(folder)) if path.name != end]


def remove_leftovers(folder: RunFolder) -> None:
    """Remove the checkpoints of a finished run, without that of its end. Raises: CannotWrite."""
    for path in leftovers(folder):
        with writing(path):
            _remove(path)
    with suppress(OSError):  # never made, or not empty
        folder.checkpoints_path.rmdir()


def discard(draft: Path) -> None:
    """Remove a draft that will not be published; what is left ``begin`` removes."""
    shutil.rmtree(draft, ignore_errors=True)


def _name(step: int) -> str:
    return f"step-{step:09d}" if step >= 0 else ""


def _remove(path: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that a crash leaves no incomplete one under its name."""
    discard(path.rename(path.with_name(f"{_DRAFT}{path.name}")))


def _drafts(folder: RunFolder) -> list[Path]:
    return list(folder.checkpoints_path.glob(f"{_DRAFT}*"))


def _remove_drafts(folder: RunFolder) -> None:
    for path in _drafts(folder):
        discard(path)
