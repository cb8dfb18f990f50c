"""What a command writes: its folder is tried before the work, its files are whole, and its results are not lost."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.config.errors import OutputError, UserError
from experiments.runs.atomic_files import load_json
from experiments.runs.disks import explained, remedy, spare_folders, try_to_write

if TYPE_CHECKING:  # it takes a second, which --help and a mistake need not wait for
    import pandas as pd


def check_folder(path: Path, option: str = "--out") -> None:
    """Find out, by writing, whether a folder takes files; it is made if it is missing, and removed again.

    Args:
        option: that named the folder.

    Raises:
        UserError: it does not.
    """
    try:
        at = next(place for place in (path, *path.parents) if place.exists())
        if not at.is_dir():
            raise UserError(f"cannot write into {path}: {at} is no folder; choose another {option}")
        try_to_write(path)
    except OSError as error:
        cure = remedy(error, "")
        to_do = f"{cure} or choose another {option}" if cure else f"choose another {option}"
        raise UserError(f"cannot write into {path}: {explained(error, path)}; {to_do}") from None


def check_file(path: Path, *, prefix: str, option: str = "--out") -> None:
    """Find out, by writing beside it, whether a JSON document can be written; it may replace one of its kind alone.

    Args:
        prefix: what ``format`` of such documents begins with.
        option: that named the file.

    Raises:
        UserError: the folder takes no files, or another file, or a folder, has this name.
    """
    check_folder(path.parent, option)
    if path.is_dir():
        raise UserError(f"{option} must be a file, got the folder {path}")
    if (path.exists() and not path.is_file()) or _is_foreign(path, prefix):
        raise UserError(f"{path} is there, and no file that this command wrote: remove it or choose another {option}")


def write_file(path: Path, data: bytes | str) -> Path:
    """Write a file, whole or not at all, in a folder that is made if it is missing; returns the path.

    Raises:
        OSError: it cannot be written; nothing is left of the attempt.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(draft, path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None
    return path


def write_csv(numbers: "pd.DataFrame", path: Path) -> Path:
    """Write numbers with eight digits and the same line ends everywhere; returns the path. Raises: OSError."""
    return write_file(path, numbers.to_csv(index=False, float_format="%.8g", lineterminator="\n"))


def write_or_rescue(write: Callable[[Path], list[Path]], out: Path) -> list[Path]:
    """Return ``write(out)``; where that folder cannot be written any more, write into a temporary one.

    Args:
        write: writes into a folder, which is there, all that was computed, and returns the paths.
        out: made if it is missing.

    Raises:
        OutputError: the folder cannot be written; the line names the temporary one.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        return write(out)
    except BrokenPipeError:
        raise  # standard output, not a file
    except OSError as error:
        path = Path(error.filename) if isinstance(error.filename, str) else out
        failed = f"cannot write {path}: {explained(error, path)}"
        to_do = remedy(error, "make it writable" if isinstance(error, PermissionError) else "remove the cause")
    for spare in spare_folders("micro-results-"):
        try:
            write(spare)
        except OSError:
            shutil.rmtree(spare, ignore_errors=True)
            continue
        raise OutputError(f"{failed}; the results are in {spare}: {to_do} and copy them to {out}")
    raise OutputError(f"{failed}, nor any temporary folder; {to_do} and run the command again")


def _is_foreign(path: Path, prefix: str) -> bool:
    has_content = path.is_file() and path.stat().st_size
    return bool(has_content and not str(load_json(path).get("format")).startswith(prefix))
