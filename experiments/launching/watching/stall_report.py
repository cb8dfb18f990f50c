"""The finding that a rank or a host stands still, in the run folder: the first that is written holds for all hosts."""

import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.runs.atomic_files import from_json, to_json
from experiments.runs.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class StallReport:
    """Why a run was ended.

    Attributes:
        rank: that stood still, or the first of the host that is gone.
        message: one line.
        time: seconds since the epoch.
        is_host: whether a host is gone, and not a rank alone.
    """

    rank: int
    message: str
    time: float
    is_host: bool = False

    @classmethod
    def of_host(cls, run_dir: Path, rank: int, message: str) -> "StallReport":
        """Return the finding of this host that a host is gone, and write it for others unless there is one."""
        own = cls(rank, message, time.time(), is_host=True)
        write_stall_report(run_dir, own)
        return own


def write_stall_report(run_dir: Path, report: StallReport) -> StallReport:
    """Write the report unless there is one, and return the one that holds."""
    path = _path(run_dir)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with suppress(OSError):  # the finding matters more than its file
        path.parent.mkdir(exist_ok=True)
        draft.write_text(to_json(asdict(report), indent=2) + "\n")
        with suppress(FileExistsError):
            os.link(draft, path)
    with suppress(OSError):
        draft.unlink()
    return read_stall_report(run_dir) or report


def read_stall_report(run_dir: Path) -> StallReport | None:
    """Return the report of this start of the ranks, None if there is none."""
    with suppress(OSError):
        return from_json(StallReport, _path(run_dir).read_bytes())
    return None


def has_stall_report(run_dir: Path) -> bool:
    """Return whether a host has written a report."""
    return _path(run_dir).exists()


def remove_stall_report(run_dir: Path) -> None:
    """Remove the report of an earlier start of the ranks."""
    _path(run_dir).unlink(missing_ok=True)


def _path(run_dir: Path) -> Path:
    return RunFolder(run_dir).errors_path / "stall.json"
