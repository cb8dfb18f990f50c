"""Read runs from their folders, from files of W&B, or from its server, into the same tidy tables.

W&B stores numbers as JSON, so 1.0 is read back as 1, and the keys of a row lose their order. ``frames.tidy`` converts
all sources to one form, so the tables of a run are the same from each source.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from experiments.config.child_environment import num_cores
from experiments.config.errors import UserError, one_line, suggestion
from experiments.reports.finished_runs import FinishedRun
from experiments.reports.frames import Frames, load, tidy
from experiments.reports.run_configs import Selection
from experiments.runs.records import Row
from experiments.tracking.wandb_account import require_key, require_wandb

NOT_NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_REMEDY = "make the mirror again with: python -m experiments.track RUN_FOLDER"


@dataclass(frozen=True, slots=True)
class _Mirror:
    """One mirrored run; its history is read when ``rows`` is called."""

    where: str
    mirrored_config: Mapping[str, Any]
    history: Callable[[], Iterable[Row]]

    @property
    def remedy(self) -> str:
        return _REMEDY

    @property
    def problem(self) -> str:
        return ""

    def config(self) -> Mapping[str, object]:
        return {key: value for key, value in self.mirrored_config.items() if key not in ("_wandb", "manifest")}

    def manifest(self) -> Mapping[str, object]:
        found = self.mirrored_config.get("manifest")
        return found if isinstance(found, Mapping) else {}

    def rows(self, kind: str) -> list[Row]:
        return [_recorded_row(row, kind) for row in self.history() if row.get(f"{kind}/step") is not None]

    def place(self, kind: str) -> str:
        return f"{self.where} ({kind})"


def from_folders(root: Path | str, selection: Selection | None = None) -> Frames:
    """Read the finished runs among the run folders under ``root``. Raises: UserError as ``frames.load`` does."""
    return load(root, selection)


def from_wandb_files(root: Path | str, selection: Selection | None = None) -> Frames:
    """Read the finished runs among the files of W&B, ``run-ID.wandb``, anywhere under ``root``.

    Raises:
        UserError: no finished run, wandb not installed, a file that cannot be read, or as ``frames.tidy`` does.
    """
    require_wandb("--source wandb-files")
    paths = sorted({path.resolve() for path in Path(root).rglob("*.wandb")}, key=lambda path: path.parent.name)
    if not paths:
        raise UserError(f"{root} holds no file of W&B (*.wandb): name a folder of runs made with tracking=wandb")
    with ThreadPoolExecutor(max_workers=min(8, num_cores())) as pool:
        read = sorted(pool.map(_read_file, paths), key=lambda each: each[2])
    runs = {name: mirror for name, mirror, _ in read}  # of several files of a run the newest of those that finished
    finished = {name: is_finished for name, _, is_finished in read}
    return tidy(_finished(runs, finished, str(root)), selection)


def from_wandb_server(project: str, selection: Selection | None = None) -> Frames:
    """Read the finished runs of ``ENTITY/PROJECT`` at the server of W&B, every row of them.

    Raises:
        UserError: no finished run, no such project, no key, a server that does not answer, or as ``frames.tidy`` does.
    """
    entity, slash, name = project.partition("/")
    if not (entity and slash and name):
        raise UserError(f"a project of W&B is ENTITY/PROJECT, got '{project}'")
    require_wandb("--source wandb")
    require_key("--source wandb", "read the files with --source wandb-files DIR")
    import wandb

    try:
        found = list(wandb.Api().runs(project, per_page=200, lazy=False))
    except Exception as error:  # errors of the network, of the server, and of wandb itself
        raise UserError(f"cannot read {project} from W&B: {one_line(error)}") from None
    runs = {run.id: _Mirror(f"W&B run {project}/{run.id}", run.config, _scan(run)) for run in found}
    return tidy(_finished(runs, {run.id: run.state == "finished" for run in found}, project), selection)


SOURCES: dict[str, Callable[[str, Selection | None], Frames]] = {
    "folders": from_folders,
    "wandb-files": from_wandb_files,
    "wandb": from_wandb_server,
}


def read(source: list[str], selection: Selection | None = None) -> Frames:
    """Read finished runs from the source that ``--source`` names by its kind and its place.

    Raises:
        UserError: no such kind, or as the function of the source.
    """
    kind, *where = source
    if kind not in SOURCES:
        raise UserError(f"--source must be one of {', '.join(SOURCES)}, got '{kind}'{suggestion(kind, SOURCES)}")
    if len(where) != 1:
        raise UserError(f"--source {kind} takes one place, as in --source {kind} {_EXAMPLES[kind]}")
    return SOURCES[kind](where[0], selection)


_EXAMPLES = {"folders": "results/runs", "wandb-files": "results/runs", "wandb": "ENTITY/PROJECT"}


def _finished(runs: Mapping[str, _Mirror], finished: Mapping[str, bool], where: str) -> dict[str, FinishedRun]:
    unfinished = [name for name in sorted(runs) if not finished[name]]
    if len(unfinished) == len(runs):
        raise UserError(f"{where} holds no finished run at W&B ({len(unfinished)} unfinished); {_REMEDY}")
    if unfinished:
        print(f"left out, not finished: {', '.join(unfinished)}")
    return {name: runs[name] for name in sorted(runs) if finished[name]}


def _read_file(path: Path) -> tuple[str, _Mirror, bool]:
    """Return the run of one file: its name, its content, and whether it finished."""
    name, config, finished = "", dict[str, Any](), False
    history: list[Row] = []
    for record in _inspect(path):
        content = record.get(record["type"]) or {}
        if record["type"] == "run":
            name, config = content["run_id"], (content.get("config") or {}).get("update") or {}
        elif record["type"] == "history":
            history.append(content["item"])
        elif record["type"] == "exit":
            finished = not content.get("exit_code")
    return name or path.stem, _Mirror(str(path), config, lambda: history), finished


def _inspect(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, as wandb's own reader prints them: one JSON object per line."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path.parent)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        raise UserError(f"cannot read {path}: {reason}; {_REMEDY}")
    return (json.loads(line) for line in done.stdout.splitlines())


def _scan(run: Any) -> Callable[[], Iterable[Row]]:
    @cache
    def history() -> Iterable[Row]:
        try:
            return list(run.scan_history(use_cache=False))  # a run that was mirrored again has other rows
        except Exception as error:
            raise UserError(f"cannot read the history of W&B run {run.id}: {one_line(error)}") from None

    return history


def _recorded_row(row: Row, kind: str) -> Row:
    """Return the part of a history's row of one kind of record, as the run recorded it."""
    recorded = {key.partition("/")[2]: value for key, value in row.items() if key.startswith(f"{kind}/")}
    return {key: NOT_NUMBERS.get(value, value) if isinstance(value, str) else value for key, value in recorded.items()}
