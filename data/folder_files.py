"""The files of a folder and of the folders in it."""

from collections.abc import Iterator
from pathlib import Path

from data.checksums import RECORD


def files_below(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yield the files of a folder and of the folders in it, linked ones as well; hidden ones are left out.

    Args:
        above: the folders that this one is in, which a link may lead back to.

    Raises:
        OSError: a folder cannot be read.
    """
    above |= {folder.resolve()}
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name == RECORD:
            continue
        if not path.is_dir():
            yield path
        elif path.resolve() not in above:
            yield from files_below(path, above)
