"""Results of measurements on disk, so that a comparison which was interrupted goes on with those that are left."""

import json
from pathlib import Path
from typing import Any

from experiments.reports.output import write_file


class KeptResults:
    """Results by the name of their measurement: a line for each, after one that says what all of them follow from.

    Args:
        path: of the file.
        basis: settings and code. Where the file has another one its results count for nothing, and the first new one
            replaces them.
    """

    def __init__(self, path: Path, basis: dict[str, Any]) -> None:
        self._path, self._head = path, json.dumps(basis, sort_keys=True, default=str)
        self._is_begun = False
        self.results = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return {}
        return dict(filter(None, map(_result, lines[1:]))) if lines[:1] == [self._head] else {}

    def add(self, name: str, result: Any) -> None:
        """Keep a result, of numbers, text, lists and mappings of them."""
        if not self._is_begun:  # written again, for an interrupt may have torn the last line
            lines = [self._head, *map(json.dumps, self.results.items())]
            write_file(self._path, "".join(f"{line}\n" for line in lines))
            self._is_begun = True
        self.results[name] = result
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, result]) + "\n")

    def forget(self) -> None:
        """Remove the file: nothing is left to measure."""
        self._path.unlink(missing_ok=True)


def _result(line: str) -> tuple[str, Any] | None:
    """Return a name and its result, None where the line is torn."""
    try:
        name, result = json.loads(line)
    except ValueError:
        return None
    return name, result
