"""Checksums of a data set's files: compared with the published ones, and with those when it was prepared."""

import json
from pathlib import Path

from data.catalogue import Entry
from data.file_sums import sum_of

RECORD = "prepared.json"  # in a set's folder: file -> sha256


def checksum_of(path: Path, like: str) -> str:
    """Return ``kind:sum`` of a file, of the same kind as ``like``."""
    kind = like.split(":")[0]
    return f"{kind}:{sum_of(path, kind)}"


def record(entry: Entry, folder: Path) -> None:
    """Write the checksums of a set's files into its folder."""
    paths = {file.name: folder / file.name for file in entry.files}
    sums = {name: checksum_of(path, "sha256:") for name, path in paths.items() if path.exists()}
    (folder / RECORD).write_text(json.dumps(sums, indent=1) + "\n")


def check_unchanged(folder: Path) -> bool:
    """Compare a set's files with their record; return whether there is one.

    Raises:
        ValueError: a file has changed since, or the record cannot be read.
    """
    recorded = _recorded(folder)
    for name, checksum in recorded.items():
        path = folder / name
        if not path.is_file() or checksum_of(path, checksum) != checksum:
            raise ValueError(f"{path} has changed since it was prepared: remove {folder} and run again")
    return bool(recorded)


def verdict(entry: Entry, folder: Path) -> list[str]:
    """Return a message about a set: which files are missing, differ from the published ones, or have no checksum."""
    missing, other, unknown = [], [], []
    for file in entry.files:
        path = file.found_in(folder)
        if path is None:
            missing.append(file.name)
        elif file.checksum is None:
            unknown.append(file.name)
        elif checksum_of(path, file.checksum) != file.checksum:
            other.append(file.name)
    lines = []
    if missing:
        lines.append(f"lacks {', '.join(missing)}, which loading it may need; to add them, remove {folder} first")
    if other:
        lines.append(f"is not the published copy: other checksums of {', '.join(other)}")
    if unknown:
        lines.append(f"has no published checksum of {', '.join(unknown)}; {folder / RECORD} holds the sha256")
    return lines or ["has the published checksums"]


def _recorded(folder: Path) -> dict[str, str]:
    path = folder / RECORD
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
        return {str(name): str(checksum) for name, checksum in content.items()}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is torn ({error}): remove {folder} and run again") from error
