"""Unpack archives whose checksums are the published ones."""

import gzip
import tarfile
import zipfile
import zlib
from pathlib import Path

_TORN = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError),
    *(NotImplementedError, RuntimeError),  # zipfile raises these for an unknown compression and a password
)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .tar.gz or .zip into folder, which exists. Neither library writes a member elsewhere.

    Raises:
        ValueError: the archive is torn, is of another kind, or has a member that would be written elsewhere.
        OSError: the files cannot be written.
    """
    try:
        if archive.name.endswith((".tar.gz", ".tgz")):
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
        elif archive.name.endswith(".zip"):
            with zipfile.ZipFile(archive) as zipped:
                zipped.extractall(folder)
        else:
            raise ValueError(f"{archive} must be a .tar.gz or a .zip")
    except _TORN as error:
        raise ValueError(f"{archive} is torn, unsafe or no archive ({error}): get it again") from error
