"""Small disks that fill up, grow, and break: a tmpfs, or ext4 in a file. Mounting them needs root."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

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
        self._filler.write_bytes(bytes(room.f_bavail * room.f_bsize - leaving))

    def free(self) -> None:
        self._filler.unlink()

    def grow(self, size: str) -> None:
        _run("mount", "-o", f"remount,size={size}", str(self.path))


class BreakingDisk:
    """An ext4 file system that Linux makes read-only after an error, also for files that are open for writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._image = path.with_suffix(".img")

    def mount(self) -> None:
        if not self._image.exists():
            with self._image.open("wb") as file:
                file.truncate(4 << 20)
            _run("mkfs.ext4", "-q", str(self._image))
        _run("mount", "-o", "loop,errors=remount-ro", str(self._image), str(self.path))

    def break_down(self) -> None:
        device = os.stat(self.path).st_dev
        name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("broken by a test")

    def repair(self) -> None:
        """Mount it again: after such an error Linux does not make it writable otherwise."""
        _run("umount", str(self.path))
        self.mount()


Disk = TypeVar("Disk", MemoryDisk, BreakingDisk)


@contextmanager
def mounted(disk: Disk) -> Iterator[Disk]:
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
