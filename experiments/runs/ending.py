"""DONE, the last file of a run: it says what the others hold, so that what is missing later is found."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from experiments.config.errors import UserError, one_line
from experiments.runs.atomic_files import RecordError, parse_json, to_json
from experiments.runs.disks import reason
from experiments.runs.rewinding import Records
from experiments.runs.row_chain import KEY
from experiments.runs.run_folder import RunFolder
from experiments.runs.whole_rows import DamagedRows, check_rows, counted, extents_from, whole_rows


class DamagedRun(UserError):
    """A finished run whose folder is not as it was when the run ended: one line with the first thing found."""


def check_ending(folder: RunFolder, records: Records, *, step: int) -> None:
    """Check that all of a run is in its folder, before DONE is written.

    Args:
        records: what was recorded.
        step: steps that were done.

    Raises:
        DamagedRows: rows are missing or damaged.
        RecordError: a file is missing.
    """
    for path in (folder.config_path, folder.manifest_path):
        if not path.exists():
            raise RecordError(f"{path} was removed while the run went on: it is not marked as done")
    steps = check_rows(folder.steps_path, records["steps"])
    if steps.step != step - 1:
        raise DamagedRows(f"{folder.steps_path} ends with step {steps.step}, and {step} steps were done")
    check_rows(folder.epochs_path, records["epochs"])


def write_done(folder: RunFolder, summary: Mapping[str, Any], records: Records, *, missing: str = "") -> None:
    """Mark a run as done.

    Args:
        summary: what to keep of its end.
        records: what was recorded.
        missing: what is missing of the records, where the user chose to go on without it; the run is then not whole.

    Raises:
        RecordError: DONE cannot be written, or a file that it names is missing.
        FolderLost: this process no longer owns the folder.
    """
    files = {path.name: _digest(path) for path in (folder.config_path, folder.manifest_path)}
    extents = {kind: extent._asdict() for kind, extent in records.items()}
    content = {**summary, "records": extents, "files": files, **({"missing": missing} if missing else {})}
    plain = json.loads(to_json(content))
    folder.mark_done({**plain, KEY: _sum(plain)})


def check_done(folder: RunFolder) -> bool:
    """Check that a finished run is whole; return False where an earlier version wrote it, which kept no sums.

    Raises:
        DamagedRun: something is missing, or is not as it was written.
    """
    try:
        return _check_done(folder, _read_done(folder.done_path))
    except RecordError as error:
        raise DamagedRun(str(error)) from None


def _check_done(folder: RunFolder, done: dict[str, Any]) -> bool:
    path = folder.done_path
    try:
        records, files = extents_from(done.get("records")), dict(done.get("files", {}))
        last_step, last_epoch = int(done.get("step", 0)) - 1, int(done.get("epoch", -1))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedRun(f"{path} is not whole") from None
    if records is None:
        _check_older(folder, last_step, last_epoch)
        return False
    if _sum({key: value for key, value in done.items() if key != KEY}) != done.get(KEY):
        raise DamagedRun(f"{path} was changed after it was written")
    for name, digest in files.items():
        if _digest(folder.path / name) != digest:
            raise DamagedRun(f"{folder.path / name} was changed after the run")
    if done.get("missing"):
        raise DamagedRun(f"it went on without records that were lost: {done['missing']}")
    for rows, extent in ((folder.steps_path, records["steps"]), (folder.epochs_path, records["epochs"])):
        span = check_rows(rows, extent)
        if span.end < rows.stat().st_size:
            raise DamagedRun(f"{rows} has more than the {counted(extent.rows)} of the run: lines were added")
    return True


def _check_older(folder: RunFolder, last_step: int, last_epoch: int) -> None:
    """Check what can be known of a run of an earlier version: that its records can be read, and where they end."""
    try:
        config = yaml.safe_load(folder.config_path.read_bytes())
    except OSError as error:
        raise DamagedRun(f"cannot read {folder.config_path}: {reason(error)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DamagedRun(f"{folder.config_path} is not a configuration: {one_line(error)}") from None
    if not isinstance(config, dict):
        raise DamagedRun(f"{folder.config_path} is not a configuration")
    for path, kind, last in ((folder.steps_path, "step", last_step), (folder.epochs_path, "epoch", last_epoch)):
        span = whole_rows(path)
        if span.problem:
            raise DamagedRun(span.problem)
        if span.rows == 0:
            raise DamagedRun(f"{path} has no rows")
        if last >= 0 and span.number not in (None, last):
            raise DamagedRun(f"{path} ends at {kind} {span.number}, the run at {last}")


def _read_done(path: Path) -> dict[str, Any]:
    try:
        return parse_json(path.read_bytes())
    except OSError as error:
        raise DamagedRun(f"cannot read {path}: {reason(error)}") from None
    except ValueError:
        raise DamagedRun(f"{path} is not whole") from None


def _digest(path: Path) -> str:
    """Return the CRC-32 of a file."""
    try:
        return f"{zlib.crc32(path.read_bytes()):08x}"
    except FileNotFoundError:
        raise RecordError(f"{path} is missing") from None
    except OSError as error:
        raise RecordError(f"cannot read {path}: {reason(error)}") from None


def _sum(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
