"""Checkpoints: the state of every rank on disk, complete or absent.

A checkpoint is a folder with one part per rank and ``CHECKPOINT.json``, which holds the size and the SHA-256 of each
part. It is written as a hidden draft and gets its name by a single rename when all of it is on the disk. So a crash at
any moment leaves earlier checkpoints as they were, and at most a draft that the next one removes. Nothing here
communicates with other ranks: rank 0 begins, all ranks write their parts, rank 0 publishes.
"""

import shutil
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.config.errors import UserError
from experiments.runs.atomic_files import cannot_write, flush_folder, write_json
from experiments.runs.checkpoint_folder import (
    Checkpoint,
    description,
    folder_name,
    list_checkpoints,
    part_path,
    published_in,
    read_description,
)
from experiments.runs.checkpoint_parts import PartDigest, TornCheckpoint, read_part, write_part
from experiments.runs.rewinding import Records
from experiments.runs.run_folder import CHECKPOINT_FILE, RunFolder

_DRAFT, _OLD = ".draft-", ".old-"  # prefixes of folders that are not yet, or no longer, checkpoints


class Checkpoints:
    """The checkpoints of one run: written by all ranks together, read by each for itself.

    Args:
        folder: Of the checkpoints; it is made with the first of them.
        run: Name of the run they belong to; those of another run are not touched.
        world_size: Number of ranks, each with a part of its own.
        keep: How many remain after a new one is published, including the new one.
        former: Other numbers of ranks, of which checkpoints are candidates too.

    Raises:
        ValueError: ``keep`` is less than 1.
    """

    def __init__(self, folder: Path, *, run: str, world_size: int, keep: int = 2, former: Container[int] = ()) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}: a run needs a checkpoint to resume from")
        self._folder, self._run, self._world_size, self._keep = folder, run, world_size, keep
        self._former = former

    def begin(self, step: int) -> Path:
        """Make the draft folder for the parts of all ranks, and remove drafts that a crash left; rank 0 calls this.

        Raises:
            UserError: It cannot be made.
        """
        draft = self._folder / f"{_DRAFT}{folder_name(step)}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            flush_folder(self._folder.parent)
            self._remove_drafts()
            draft.mkdir()
        except OSError as error:
            raise cannot_write(draft, error) from None
        return draft

    def write_part(self, draft: Path, rank: int, state: Mapping[str, Any]) -> PartDigest:
        """Write the state of ``rank``; every rank calls this with the folder that ``begin`` made.

        No second copy of the state is made: one tensor at a time is copied to the CPU. For a view the whole
        storage is written, once for all views of it.

        Args:
            state: Dicts, lists, tuples and sets of tensors, numbers, strings and None.

        Raises:
            UserError: The disk is full, or the part cannot be written for another reason; its file is removed, and
                rank 0 may ``discard`` the draft when no rank writes any more.
            TypeError: A value has another type, which a checkpoint cannot hold.
        """
        return write_part(part_path(draft, rank), state)

    def publish(
        self, draft: Path, step: int, parts: Sequence[PartDigest], records: Records | None = None
    ) -> Checkpoint:
        """Make the draft a checkpoint and remove all but the newest; rank 0 calls this when all parts are written.

        An unusable checkpoint of the same step stays until the new one is complete. Checkpoints of later steps are
        removed as well: the run was rewound to an earlier step.

        Args:
            parts: What ``write_part`` returned on each rank, in the order of ranks.
            records: What was recorded of the steps and epochs until now.

        Raises:
            UserError: It cannot be written, or a part is not on this disk; the draft is removed.
        """
        path = self._free_path(step)
        try:
            _check_parts(draft, parts, self._world_size)
            write_json(draft / CHECKPOINT_FILE, description(self._run, step, parts, records))
            draft.rename(path)
            flush_folder(self._folder)
        except OSError as error:
            self.discard(draft)
            raise cannot_write(path, error) from None
        except UserError:
            self.discard(draft)
            raise
        published = Checkpoint(path=path, step=step, world_size=self._world_size, run=self._run, records=records)
        self._remove_all_but_newest(published)
        return published

    def discard(self, draft: Path) -> None:
        """Remove a draft that will not be published, because a rank could not write its part."""
        shutil.rmtree(draft, ignore_errors=True)

    def candidates(self) -> list[Checkpoint]:
        """Return the run's checkpoints, newest first; ``problems`` returns why others cannot be used."""
        return self._list()[0]

    def problems(self) -> list[str]:
        """Return one line for each folder that looks like a checkpoint and cannot be used."""
        return self._list()[1]

    @staticmethod
    def read_part(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
        """Return the state that ``rank`` wrote, its tensors on the CPU.

        Raises:
            TornCheckpoint: The part is missing or damaged.
            UserError: There is no part of that rank.
        """
        parts = read_description(checkpoint.path)[1]
        if not 0 <= rank < len(parts):
            raise UserError(f"{checkpoint.path} has parts of ranks 0 to {len(parts) - 1}, none of rank {rank}")
        return read_part(part_path(checkpoint.path, rank), parts[rank])

    def remove_after(self, step: int) -> None:
        """Remove the run's checkpoints of steps after ``step``, which a run rewound to ``step`` will write again.

        Raises:
            UserError: One cannot be removed.
        """
        for checkpoint in self.candidates():
            if checkpoint.step > step:
                self._remove(checkpoint.path)

    def remove_all(self) -> None:
        """Remove the checkpoints of a finished run; those of other runs stay.

        Raises:
            UserError: One cannot be removed.
        """
        for path in published_in(self._folder):
            if self._is_ours_or_damaged(path):
                self._remove(path)
        self._remove_drafts()
        with suppress(OSError):  # never made, or not empty
            self._folder.rmdir()

    def _list(self) -> tuple[list[Checkpoint], list[str]]:
        return list_checkpoints(self._folder, self._describe_own)

    def _describe_own(self, path: Path) -> Checkpoint:
        checkpoint, _ = read_description(path)
        if checkpoint.run != self._run:
            raise UserError(f"{path} belongs to run {checkpoint.run}, not to {self._run}; it is ignored")
        if checkpoint.world_size != self._world_size and checkpoint.world_size not in self._former:
            ranks = f"{checkpoint.world_size} ranks, and this run has {self._world_size}"
            raise UserError(f"{path} holds the state of {ranks}; it is ignored")
        return checkpoint

    def _is_ours_or_damaged(self, path: Path) -> bool:
        try:
            self._describe_own(path)
        except TornCheckpoint:
            return True
        except UserError:
            return False
        return True

    def _free_path(self, step: int) -> Path:
        """Return a path that is free: of two checkpoints of one step, the second ends in -2."""
        path, repetition = self._folder / folder_name(step), 1
        while path.exists():
            repetition += 1
            path = path.with_name(f"{folder_name(step)}-{repetition}")
        return path

    def _remove_all_but_newest(self, published: Checkpoint) -> None:
        others = [checkpoint for checkpoint in self.candidates() if checkpoint != published]
        kept = [checkpoint for checkpoint in others if checkpoint.step < published.step][: self._keep - 1]
        for checkpoint in others:
            if checkpoint not in kept:
                self._remove(checkpoint.path)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint; it is renamed first, so that a crash leaves no incomplete one under its name."""
        old = path.with_name(f"{_OLD}{path.name}")
        try:
            path.rename(old)
        except OSError as error:
            raise cannot_write(path, error) from None
        shutil.rmtree(old, ignore_errors=True)  # ``begin`` removes what is left

    def _remove_drafts(self) -> None:
        for pattern in (f"{_DRAFT}*", f"{_OLD}*"):
            for path in self._folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)


def open_checkpoint(path: Path) -> Checkpoint:
    """Return a checkpoint of any run: the newest of a run's folder, or the one whose folder ``path`` is.

    Raises:
        UserError: There is none.
    """
    if (path / CHECKPOINT_FILE).exists():
        return read_description(path)[0]
    found, problems = list_checkpoints(RunFolder(path).checkpoints_path, lambda folder: read_description(folder)[0])
    if found:
        return found[0]
    if problems:
        raise UserError(problems[-1])
    wanted = "give the folder of a run, or one of the folders in its checkpoints/"
    raise UserError(f"no checkpoint in {path}; {wanted}" if path.exists() else f"no folder {path}; {wanted}")


def _check_parts(draft: Path, parts: Sequence[PartDigest], world_size: int) -> None:
    assert len(parts) == world_size, f"{len(parts)} parts of {world_size} ranks"
    for rank, part in enumerate(parts):
        path = part_path(draft, rank)
        if not path.exists() or path.stat().st_size != part.size:
            remedy = "put the run's folder on a disk that all nodes share"
            raise UserError(f"the part that rank {rank} wrote of a checkpoint is not at {path}; {remedy}")
