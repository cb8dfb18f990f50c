"""Small disks that fill up and grow: a tmpfs. Mounting it needs root."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class MemoryDisk:
    """A tmpfs of a size like ``40k``."""

    def __init__(self, path: Path, size: str) -> None:
        self.path, self._size = path, size
        self._filler = path / "filler"

    def mount(self) -> None:
        _run("mount", "-t", "tmpfs", "-o", f"size={self._size}", "tmpfs", str(self.path))

    def fill(self, *, leaving: int = 0) -> None:
        """Write a file that leaves some bytes of the disk free; ``free`` removes it."""
        room = os.statvfs(self.path)
        try:
            self._filler.write_bytes(bytes(room.f_bavail * room.f_bsize - leaving))
        except OSError as error:
            if error.errno != errno.ENOSPC:  # others write too: full it is
                raise

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    def grow(self, size: str) -> None:
        _run("mount", "-o", f"remount,size={size}", str(self.path))


@contextmanager
def mounted(disk: MemoryDisk) -> Iterator[MemoryDisk]:
    """Mount a disk while a context lasts; skip the test where this user, or this system, cannot."""
    if os.geteuid():
        pytest.skip("needs root, to mount a small disk")
    disk.path.mkdir(parents=True, exist_ok=True)
    try:
        disk.mount()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small disk: {error}")
    try:
        yield disk
    finally:
        _run("umount", "-l", str(disk.path))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
