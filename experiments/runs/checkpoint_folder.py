"""The folder of a checkpoint: its name, the names of its parts, and what ``CHECKPOINT.json`` says of it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from experiments.config.errors import UserError
from experiments.runs.atomic_files import parse_json
from experiments.runs.checkpoint_parts import PartDigest, torn
from experiments.runs.disks import reason
from experiments.runs.rewinding import Records
from experiments.runs.run_folder import CHECKPOINT_FILE
from experiments.runs.whole_rows import extents_from

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was published.

    Args:
        path: Its folder.
        step: Steps done when it was saved, which is the number of the next step.
        world_size: Number of its parts.
        run: Name of the run it belongs to.
        records: What was recorded of the steps and epochs until then; None in one of an earlier version.
    """

    path: Path
    step: int
    world_size: int
    run: str
    records: Records | None = None


def description(run: str, step: int, parts: Sequence[PartDigest], records: Records | None) -> dict[str, Any]:
    """Return the content of ``CHECKPOINT.json`` for the parts of all ranks, in the order of ranks."""
    return {
        "format": FORMAT,
        "run": run,
        "step": step,
        "world_size": len(parts),
        "parts": [part._asdict() for part in parts],
        "records": records and {kind: extent._asdict() for kind, extent in records.items()},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
    }


def folder_name(step: int) -> str:
    """Return the name of the first checkpoint of a step; a second one of it has ``-2`` behind."""
    return f"step-{step:09d}"


def part_path(folder: Path, rank: int) -> Path:
    """Return where the part of a rank is."""
    return folder / f"rank{rank}.pt"


def published_in(folder: Path) -> list[Path]:
    """Return the folders of checkpoints, whether they can be read or not; drafts are left out."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def list_checkpoints(folder: Path, read: Callable[[Path], Checkpoint]) -> tuple[list[Checkpoint], list[str]]:
    """Return the checkpoints that can be read, newest first, and one line for each of the others."""
    found, problems = [], []
    for path in published_in(folder):
        try:
            found.append(read(path))
        except UserError as error:
            problems.append(str(error))
    return sorted(found, key=_age, reverse=True), problems


def _age(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return the sort key of a checkpoint: its step, then how often that step was published."""
    repeated = re.fullmatch(r"step-\d+-(\d+)", checkpoint.path.name)
    return checkpoint.step, int(repeated[1]) if repeated else 1


def read_description(folder: Path) -> tuple[Checkpoint, list[PartDigest]]:
    """Return a checkpoint and the size and checksum of its parts.

    Raises:
        TornCheckpoint: its description is missing or damaged.
        UserError: it has a newer format.
    """
    path = folder / CHECKPOINT_FILE
    try:
        description = parse_json(path.read_bytes())
        version = int(description["format"])
    except OSError as error:
        raise torn(path, reason(error)) from None
    except (ValueError, KeyError, TypeError):
        raise torn(path, "not the description of a checkpoint") from None
    if version > FORMAT:
        can = f"this program reads up to {FORMAT}; update it, or remove the folder"
        raise UserError(f"{folder} is a checkpoint of format {version}, and {can}")
    return _parse(description, path)


def _parse(description: dict[str, Any], path: Path) -> tuple[Checkpoint, list[PartDigest]]:
    try:
        parts = [PartDigest(str(part["sha256"]), int(part["size"])) for part in description["parts"]]
        step, world_size, run = int(description["step"]), int(description["world_size"]), str(description["run"])
        records = extents_from(description.get("records"))
    except (ValueError, KeyError, TypeError):
        raise torn(path, "not the description of a checkpoint") from None
    if len(parts) != world_size:
        raise torn(path, f"{len(parts)} parts of {world_size} ranks")
    return Checkpoint(path=path.parent, step=step, world_size=world_size, run=run, records=records), parts
