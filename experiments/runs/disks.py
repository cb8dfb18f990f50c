"""Disks that cannot be written: how to find out by writing, and what to say of it."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rich.filesize import decimal

_REMEDIES = {  # errors that concern the whole disk, or all files: another file there would meet the same
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space, or have the quota raised,",
    errno.EROFS: "make its disk writable again",
    errno.EIO: "check that disk",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}
_TRIAL = bytes(4096)  # one block: a full disk may still make an empty file


def is_of_disk(error: OSError) -> bool:
    """Return whether an error is that of a full, read-only or broken disk."""
    return error.errno in _REMEDIES


def reason(error: OSError) -> str:
    """Return the operating system's message of an error, in lower case."""
    return (error.strerror or str(error)).lower()


def explained(error: OSError, path: Path) -> str:
    """Return why ``path`` cannot be written, with the free space where there is too little."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return reason(error)
    folder = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
    usage = shutil.disk_usage(folder)
    return f"{reason(error)} ({decimal(usage.free)} of {decimal(usage.total)} free)"


def remedy(error: OSError, otherwise: str = "choose a folder that can be written") -> str:
    """Return what to do about an error of writing."""
    return _REMEDIES.get(error.errno or 0, otherwise)


def try_to_write(folder: Path) -> None:
    """Write a small file in a folder, which is made if it is missing; what was made is removed again.

    Only this shows whether a disk can be written: permissions do not count for root, and a full disk has them. Raises:
    OSError.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".micro-", dir=folder, buffering=0) as file:
            if file.write(_TRIAL) < len(_TRIAL):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
    finally:
        for path in missing:
            with suppress(OSError):  # never made, or in use by another process meanwhile
                path.rmdir()


def spare_folders(prefix: str) -> Iterator[Path]:
    """Yield new folders for temporary files, one on each disk that is usual for them and can be written."""
    for place in (tempfile.gettempdir, lambda: "/dev/shm", os.getcwd):
        with suppress(OSError):
            try_to_write(Path(place()))
            yield Path(tempfile.mkdtemp(prefix=prefix, dir=place()))
