"""Checksums of a data set's files, which distinguish runs on different data."""

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

SUMS = ".checksums"  # in a folder: name of a large file -> size, modification time in ns, sha256
LARGE = 16 << 20  # bytes; smaller files are read each time


def sums_of(folder: Path, paths: Iterable[Path], *, remedy: str = "") -> dict[str, str]:
    """Return the sha256 of files by their names in ``folder``.

    A large file is read once: its sum is kept in ``folder``, where that can be written, and taken again while the
    file's size and time are the same.

    Args:
        remedy: what to do where a large file has to be read, which is then an error; empty: it is read.

    Raises:
        ValueError: a file cannot be read, or has to be read and must not.
    """
    known = _known_sums(folder)
    found: dict[str, list[int | str]] = {}
    for path in paths:
        name = str(path.relative_to(folder))
        try:
            status = path.stat()
            stamp: list[int | str] = [status.st_size, status.st_mtime_ns]
            is_known = status.st_size >= LARGE and known.get(name, [])[:2] == stamp
            if remedy and status.st_size >= LARGE and not is_known:
                raise ValueError(f"{path} is not as it was prepared, or was not: {remedy}")
            found[name] = known[name] if is_known else [*stamp, sum_of(path)]
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}): it is part of the data") from error
    large = {name: entry for name, entry in found.items() if int(entry[0]) >= LARGE}
    if any(known.get(name) != entry for name, entry in large.items()):
        content = json.dumps(known | large, indent=1).encode()
        try_to_write(folder / SUMS, lambda file: file.write(content))
    return {name: str(entry[2]) for name, entry in found.items()}


def sum_of(path: Path, kind: str = "sha256") -> str:
    """Return the checksum of a file. Raises: OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def _known_sums(folder: Path) -> dict[str, list[int | str]]:
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        content = json.loads((folder / SUMS).read_text())
        return {str(name): list(entry) for name, entry in content.items() if len(entry) == 3}
    return {}


def try_to_write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file completely or not at all; do nothing if the folder cannot be written."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")  # ranks may write at the same time
    try:
        with draft.open("xb") as file:
            write(file)
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
