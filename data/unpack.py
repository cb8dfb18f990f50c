"""Unpack archives without trusting their contents."""

import gzip
import stat
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

_EXPANSION, _ALLOWANCE = 50, 1 << 30  # an archive may unpack to 50 times its size and 1 GiB: no data set comes near

_TORN = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError),
    *(NotImplementedError, RuntimeError),  # from zipfile: an unknown compression, a password
)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .tar.gz or .zip into folder, which exists.

    Raises:
        ValueError: the archive is torn, is of another kind, unpacks to far more than its size, or has a member that
            would be written elsewhere.
        OSError: the files cannot be written.
    """
    try:
        if archive.name.endswith((".tar.gz", ".tgz")):
            _untar(archive, folder)
        elif archive.name.endswith(".zip"):
            _unzip(archive, folder)
        else:
            raise ValueError(f"{archive} must be a .tar.gz or a .zip")
    except (tarfile.FilterError, _Unsafe) as error:
        raise ValueError(f"{archive} is not unpacked: it is unsafe ({error})") from error
    except _TORN as error:
        raise ValueError(f"{archive} is torn or no archive ({error}): get it again") from error


class _Unsafe(Exception):
    pass


def _untar(archive: Path, folder: Path) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise ValueError("unpacking a .tar.gz needs Python 3.11.4 or newer, whose tarfile refuses unsafe members")
    largest, total = _largest(archive), 0

    def checked(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        nonlocal total
        total += member.size
        _check_size(total, largest)
        return tarfile.data_filter(member, path)

    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter=checked)


def _unzip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        _check_size(sum(member.file_size for member in opened.infolist()), _largest(archive))
        for member in opened.infolist():
            path = PurePosixPath(member.filename.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts or ":" in member.filename[:2]:
                raise _Unsafe(f"its member '{member.filename}' would be written outside the folder")
            if stat.S_ISLNK(member.external_attr >> 16):
                raise _Unsafe(f"its member '{member.filename}' is a link")
        opened.extractall(folder)


def _largest(archive: Path) -> int:
    return _ALLOWANCE + _EXPANSION * archive.stat().st_size


def _check_size(size: int, largest: int) -> None:
    """Refuse a bomb. Neither library writes more of a member than the size that its header declares."""
    if size > largest:
        raise _Unsafe(f"it unpacks to {size} bytes or more, and {largest} are allowed for its size")
