"""Finished runs where training left them: their configurations and records, read from run folders."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml

from experiments.config.errors import UserError
from experiments.runs.json_lines import Row, read_records
from experiments.runs.run_folder import RunFolder


class FinishedRun(Protocol):
    """One finished run, wherever its records are.

    Attributes:
        remedy: what to do where they are broken.
    """

    @property
    def remedy(self) -> str: ...  # noqa: D102

    def config(self) -> Mapping[str, object]:
        """Return its configuration, nested as in config.yaml."""

    def rows(self, kind: str) -> list[Row]:
        """Return the rows of ``steps`` or ``epochs``. Raises: UserError when they cannot be read."""

    def place(self, kind: str) -> str:
        """Return what to call where its configuration, steps or epochs are."""


@dataclass(frozen=True, slots=True)
class _FolderRun:
    path: Path

    @property
    def remedy(self) -> str:
        return f"delete the folder {self.path} and run it again"

    def config(self) -> Mapping[str, object]:
        return yaml.safe_load((self.path / "config.yaml").read_text()) or {}

    def rows(self, kind: str) -> list[Row]:
        rows = read_records(self.path / f"{kind}.jsonl")
        end = {"steps": self._ending("step") - 1, "epochs": self._ending("epoch")}[kind]
        last = rows[-1].get(kind[:-1], end) if rows else end  # a record without rows is refused where it is read
        if end >= 0 and last != end:
            raise UserError(f"{self.place(kind)} ends at {kind[:-1]} {last}, the run at {end}; {self.remedy}")
        return rows

    def _ending(self, key: str) -> int:
        """Return the last step or epoch that DONE names; -1 where it names none."""
        path = self.path / "DONE"
        try:
            return int(json.loads(path.read_text()).get(key, -1))
        except (OSError, ValueError, AttributeError, TypeError):
            raise UserError(f"{path} is not whole; {self.remedy}") from None

    def place(self, kind: str) -> str:
        return str(self.path / ("config.yaml" if kind == "configuration" else f"{kind}.jsonl"))


def in_folders(root: Path) -> dict[str, FinishedRun]:
    """Return the finished runs under a folder by name; prints which are left out."""
    folders = [RunFolder(path.parent) for path in sorted(root.glob("*/config.yaml"))]
    done = [folder.path for folder in folders if folder.is_done()]
    unfinished = [_unfinished_name(folder) for folder in folders if not folder.is_done()]
    if not done:
        also = f" ({len(unfinished)} unfinished)" if unfinished else ""
        raise UserError(f"{root} holds no finished run{also}; make some with: python -m experiments.train")
    if unfinished:
        print(f"left out, not finished: {', '.join(unfinished)}")
    return {folder.name: _FolderRun(folder) for folder in done}


def _unfinished_name(folder: RunFolder) -> str:
    return f"{folder.path.name} (failed)" if folder.failure_path.exists() else folder.path.name
