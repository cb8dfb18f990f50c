"""Finished runs where training left them: their configurations and records, read from run folders."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml

from experiments.config.errors import UserError, one_line
from experiments.runs.atomic_files import load_json
from experiments.runs.records import Row, read_records
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import State, status_of


class FinishedRun(Protocol):
    """One finished run, wherever its records are: in a folder, or at W&B.

    Attributes:
        remedy: what to do where they are broken.
        problem: what is missing or damaged, empty where nothing is.
    """

    @property
    def remedy(self) -> str: ...  # noqa: D102

    @property
    def problem(self) -> str: ...  # noqa: D102

    def config(self) -> Mapping[str, object]:
        """Return its configuration, nested as in config.yaml. Raises: UserError when it cannot be read."""

    def manifest(self) -> Mapping[str, object]:
        """Return its manifest, empty where there is none that can be read."""

    def rows(self, kind: str) -> list[Row]:
        """Return the rows of ``steps`` or ``epochs``. Raises: UserError."""

    def place(self, kind: str) -> str:
        """Return what to call where its configuration, steps or epochs are."""


@dataclass(frozen=True, slots=True)
class _FolderRun:
    path: Path
    problem: str

    @property
    def remedy(self) -> str:
        return f"remove {self.path} and run it again"

    def config(self) -> Mapping[str, object]:
        path = self.path / "config.yaml"
        try:
            found = yaml.safe_load(path.read_bytes())
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise UserError(self.problem or f"{path} cannot be read: {one_line(error)}; {self.remedy}") from None
        if not isinstance(found, dict):
            raise UserError(f"{path} is not a configuration; {self.remedy}")
        return found

    def manifest(self) -> Mapping[str, object]:
        return load_json(self.path / "manifest.json")

    def rows(self, kind: str) -> list[Row]:
        return read_records(self.path / f"{kind}.jsonl")

    def place(self, kind: str) -> str:
        return str(self.path / ("config.yaml" if kind == "configuration" else f"{kind}.jsonl"))


def in_folders(root: Path) -> dict[str, FinishedRun]:
    """Return the finished runs under a folder by name, damaged ones too; prints which are left out."""
    paths = {path.parent for name in ("config.yaml", "DONE") for path in root.glob(f"*/{name}")}
    folders = [RunFolder(path) for path in sorted(paths)]
    done = [folder for folder in folders if folder.is_done()]
    unfinished = [_unfinished_name(folder) for folder in folders if not folder.is_done()]
    if not done:
        also = f" ({len(unfinished)} unfinished)" if unfinished else ""
        raise UserError(f"{root} holds no finished run{also}; make some with: python -m experiments.train")
    if unfinished:
        print(f"left out, not finished: {', '.join(unfinished)}")
    return {folder.path.name: _FolderRun(folder.path, status_of(folder).problem) for folder in done}


def refuse_damaged(found: Mapping[str, FinishedRun], names: Iterable[str]) -> None:
    """Raise UserError where one of some runs is damaged; of several each has a line."""
    problems = {name: found[name].problem for name in names if found[name].problem}
    for name, problem in problems.items() if len(problems) > 1 else ():
        print(f"error: {name} is damaged: {problem}", file=sys.stderr)
    if problems:
        name, problem = next(iter(problems.items()))
        what = f"{name} is damaged: {problem}" if len(problems) == 1 else f"{len(problems)} runs are damaged"
        raise UserError(f"{what}; run {'them' if len(problems) > 1 else 'it'} again with resume=scratch")


def _unfinished_name(folder: RunFolder) -> str:
    names = {State.FAILED: " (failed)", State.DAMAGED: " (damaged)"}
    return folder.path.name + names.get(status_of(folder).state, "")
