"""Rows of a measurement that takes minutes, kept as they are made: the same command goes on where it was stopped."""

from collections.abc import Mapping
from pathlib import Path

import torch

from experiments.config.paths import ROOT
from experiments.launching.measurements import Row, Settings
from experiments.runs.git_state import git_state
from experiments.runs.json_lines import RecordWriter, read_records


class KeptRows:
    """Rows by their settings, in a file; a row that other code or another torch measured is none.

    Args:
        path: of the file; it is there while a measurement is not finished.

    Raises:
        RecordError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._code = {**git_state(ROOT), "torch": torch.__version__}
        self._rows = read_records(path) if path.exists() else []

    def find(self, settings: Settings) -> Row | None:
        """Return the row that was measured with these settings by this code, or None."""
        return next((kept["row"] for kept in self._rows if self._is_of(kept, settings)), None)

    def keep(self, settings: Settings, row: Row) -> None:
        """Add a row. Raises: RecordError: the file cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with RecordWriter(self.path) as writer:
            writer.append({"settings": settings, "code": self._code, "row": row})

    def forget(self) -> None:
        """Remove the file: all that it holds stands in the table."""
        self.path.unlink(missing_ok=True)

    def _is_of(self, kept: Mapping[str, object], settings: Settings) -> bool:
        return kept["settings"] == settings and kept["code"] == self._code
