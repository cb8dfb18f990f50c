"""Unpack archives without trusting their contents."""

import gzip
import stat
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

_TORN = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError),
    *(NotImplementedError, RuntimeError),  # from zipfile: an unknown compression, a password
)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .tar.gz or .zip into folder, which exists.

    Raises:
        ValueError: the archive is torn, is of another kind, or has a member that would be written elsewhere.
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
        raise ValueError(f"{archive} is not unpacked: it holds an unsafe member ({error})") from error
    except _TORN as error:
        raise ValueError(f"{archive} is torn or no archive ({error}): get it again") from error


class _Unsafe(Exception):
    pass


def _untar(archive: Path, folder: Path) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise ValueError("unpacking a .tar.gz needs Python 3.11.4 or newer, whose tarfile refuses unsafe members")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")


def _unzip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        for member in opened.infolist():
            path = PurePosixPath(member.filename.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts or ":" in member.filename[:2]:
                raise _Unsafe(f"'{member.filename}' would be written outside the folder")
            if stat.S_ISLNK(member.external_attr >> 16):
                raise _Unsafe(f"'{member.filename}' is a link")
        opened.extractall(folder)
