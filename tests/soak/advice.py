"""Follow what an error advises, as a user would."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

Words = list[str]


def follow(error: str) -> Words | None:
    """Do what a line of an error advises; return the words to add to the command, None if it advises nothing known."""
    for pattern, deed in _KNOWN:
        if found := re.search(pattern, error):
            return deed(found)
    return None


def _remove_line(found: re.Match[str]) -> Words:
    path, number = Path(found["path"]), int(found["number"])
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[number - 1]
    path.write_bytes(b"".join(lines))
    return []


def _remove(found: re.Match[str]) -> Words:
    path = Path(found["path"])
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return []


def _add(found: re.Match[str]) -> Words:
    return [found["word"]]


_KNOWN: tuple[tuple[str, Callable[[re.Match[str]], Words]], ...] = (
    (r"(?P<path>/\S+), line (?P<number>\d+) .*remove the line", _remove_line),
    (r"\b(?P<word>resume=scratch)\b", _add),
    (r"remove (?P<path>/\S+\w)", _remove),
)
