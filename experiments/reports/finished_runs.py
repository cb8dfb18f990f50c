"""Read configurations and records of finished runs from run folders."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.config.errors import UserError
from experiments.runs.files import Damaged, load_json
from experiments.runs.records import Row, read_records
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import State, status_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """One finished run, wherever its records are: in a folder, or at W&B.

    Attributes:
        config, manifest: what its files hold, the former nested as in config.yaml.
        rows: those of ``steps`` or ``epochs``. Raises: UserError.
        place: what to call where its configuration, steps or epochs are.
        remedy: what to do where they are broken.
        problem: what is missing or damaged, empty where nothing is.
    """

    config: Mapping[str, object]
    manifest: Mapping[str, object]
    rows: Callable[[str], list[Row]]
    place: Callable[[str], str]
    remedy: str
    problem: str = ""


def _in_folder(folder: RunFolder) -> FinishedRun:
    path, problem = folder.path, status_of(folder).problem
    remedy = f"remove {path} and run it again"
    try:
        config = folder.config()
    except Damaged as error:
        raise UserError(problem or f"{error}; {remedy}") from None
    return FinishedRun(
        config=config,
        manifest=load_json(folder.manifest_path),
        rows=lambda kind: read_records(path / f"{kind}.jsonl"),
        place=lambda kind: str(path / ("config.yaml" if kind == "configuration" else f"{kind}.jsonl")),
        remedy=remedy,
        problem=problem,
    )


def in_folders(root: Path) -> dict[str, FinishedRun]:
    """Return the finished runs under a folder by name, damaged ones too; prints which are left out."""
    paths = {path.parent for name in ("config.yaml", "DONE") for path in root.glob(f"*/{name}")}
    folders = [RunFolder(path) for path in sorted(paths)]
    done = [folder for folder in folders if folder.is_done()]
    unfinished = [_unfinished_name(folder) for folder in folders if not folder.is_done()]
    if not done:
        also = f" ({len(unfinished)} unfinished)" if unfinished else ""
        if (root / "config.yaml").exists():
            also = f", it is itself a run: name the folder that it is in, {root.absolute().parent}"
        raise UserError(f"{root} holds no finished run{also}; make some with: python -m experiments.train")
    if unfinished:
        print(f"left out, not finished: {', '.join(unfinished)}")
    return {folder.path.name: _in_folder(folder) for folder in done}


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
