"""DONE, the last file of a run: it says what the others hold, so that what is missing later is found."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.config.errors import UserError
from experiments.runs.atomic_files import Digest, RecordError, digest_of, parse_json, to_json
from experiments.runs.disks import reason
from experiments.runs.records import Extent
from experiments.runs.run_folder import RunFolder

_KEY = "sha256"  # of all else in DONE


class DamagedRun(UserError):
    """A finished run whose folder is not as it was when the run ended: one line with the first thing found."""


def check_ending(folder: RunFolder, records: Mapping[str, Extent]) -> None:
    """Check that all of a run is in its folder, before DONE is written.

    Args:
        records: what was recorded, by the name of the file.

    Raises:
        RecordError: a file was removed or changed meanwhile.
    """
    for path in _others(folder):
        if not path.exists():
            raise RecordError(f"{path} was removed while the run went on: it is not marked as done")
    for name, extent in records.items():
        extent.check(folder.path / name, is_all=True)


def write_done(folder: RunFolder, summary: Mapping[str, Any], records: Mapping[str, Extent]) -> None:
    """Mark a run as done.

    Args:
        summary: what to keep of its end.
        records: as for ``check_ending``.

    Raises:
        RecordError: DONE cannot be written.
        FolderLost: this process no longer owns the folder.
    """
    content = {
        **summary,
        "records": {name: extent._asdict() for name, extent in records.items()},
        "files": {path.name: digest_of(path)._asdict() for path in _others(folder)},
    }
    plain = json.loads(to_json(content))
    folder.mark_done({**plain, _KEY: _sha256(plain)})


def check_done(folder: RunFolder) -> None:
    """Check that a finished run is whole.

    Raises:
        DamagedRun: something is missing, or is not as it was written.
    """
    try:
        done = parse_json(folder.done_path.read_bytes())
        records = {name: Extent.parse(extent) for name, extent in done["records"].items()}
        files = {name: Digest(int(value["bytes"]), str(value["sha256"])) for name, value in done["files"].items()}
    except OSError as error:
        raise DamagedRun(f"cannot read {folder.done_path}: {reason(error)}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise DamagedRun(f"{folder.done_path} is not whole") from None
    if _sha256({key: value for key, value in done.items() if key != _KEY}) != done.get(_KEY):
        raise DamagedRun(f"{folder.done_path} was changed after it was written")
    for name, digest in files.items():
        _check_file(folder.path / name, digest)
    for name, extent in records.items():
        try:
            extent.check(folder.path / name, is_all=True)
        except (RecordError, OSError) as error:
            raise DamagedRun(str(error)) from None


def _check_file(path: Path, digest: Digest) -> None:
    try:
        if digest_of(path) != digest:
            raise DamagedRun(f"{path} was changed after the run")
    except FileNotFoundError:
        raise DamagedRun(f"{path} is missing") from None
    except OSError as error:
        raise DamagedRun(f"cannot read {path}: {reason(error)}") from None


def _others(folder: RunFolder) -> tuple[Path, ...]:
    return folder.config_path, folder.manifest_path


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
