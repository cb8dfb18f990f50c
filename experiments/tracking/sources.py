"""Read runs from files of W&B, or from its server, into the same tidy tables as from their folders.

W&B stores numbers as JSON, so 1.0 is read back as 1, and the keys of a row lose their order. ``frames.tidy`` converts
all sources to one form, so the tables of a run are the same from each source.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from experiments.config.child_environment import num_cores
from experiments.config.errors import UserError, check_choice, one_line
from experiments.reports.finished_runs import FinishedRun
from experiments.reports.frames import Frames, tidy
from experiments.reports.run_configs import Selection
from experiments.runs.records import Row
from experiments.tracking.wandb_account import require_key, require_wandb
from experiments.tracking.wandb_mirror import FOLDER

_NOT_NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_REMEDY = "make the mirror again with: python -m experiments.track RUN_FOLDER"


class _Mirror(NamedTuple):
    """One mirrored run; its history is read when its rows are."""

    name: str
    where: str
    is_finished: bool
    mirrored: Mapping[str, Any]
    history: Callable[[], Iterable[Row]]

    def finished(self) -> FinishedRun:
        """Return the run as those of folders are."""
        manifest = self.mirrored.get("manifest")
        config = {key: value for key, value in self.mirrored.items() if key not in ("_wandb", "manifest", FOLDER)}
        return FinishedRun(
            config=lambda: config,
            manifest=lambda: manifest if isinstance(manifest, Mapping) else {},
            rows=self._rows,
            place=lambda kind: f"{self.where} ({kind})",
            remedy=_REMEDY,
        )

    def _rows(self, kind: str) -> list[Row]:
        return [
            {key.partition("/")[2]: _as_recorded(value) for key, value in row.items() if key.startswith(f"{kind}/")}
            for row in self.history()
            if row.get(f"{kind}/step") is not None
        ]


def read(source: list[str], selection: Selection | None = None) -> Frames:
    """Read finished runs from the source that ``--source`` names by its kind and its place. Raises: UserError."""
    kind, *where = source
    check_choice("--source", _SOURCES, kind)
    example, find = _SOURCES[kind]
    if len(where) != 1:
        raise UserError(f"--source {kind} takes one place, as in --source {kind} {example}")
    found = find(where[0])
    unfinished = sorted(
        {run.name for run in found if not run.is_finished} - {run.name for run in found if run.is_finished}
    )
    runs = {run.name: run.finished() for run in sorted(found, key=lambda run: run.name) if run.is_finished}
    if not runs:
        raise UserError(f"{where[0]} holds no finished run at W&B ({len(unfinished)} unfinished); {_REMEDY}")
    if unfinished:
        print(f"left out, not finished: {', '.join(unfinished)}")
    return tidy(runs, selection)


def _in_files(root: str) -> list[_Mirror]:
    """Read the files of W&B, ``run-ID.wandb``, anywhere under ``root``; of several of a run the newest comes last."""
    require_wandb("--source wandb-files")
    paths = sorted({path.resolve() for path in Path(root).rglob("*.wandb")}, key=lambda path: path.parent.name)
    if not paths:
        raise UserError(f"{root} holds no file of W&B (*.wandb): name a folder of runs made with tracking=wandb")
    with ThreadPoolExecutor(max_workers=min(8, num_cores())) as pool:
        return list(pool.map(_read_file, paths))


def _read_file(path: Path) -> _Mirror:
    """Read one file by wandb's own reader, which prints its records as lines of JSON."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path.parent)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        raise UserError(f"cannot read {path}: {reason}; {_REMEDY}")
    found: dict[str, list[Any]] = {}
    for record in map(json.loads, done.stdout.splitlines()):
        found.setdefault(record["type"], []).append(record.get(record["type"]) or {})
    run = (found.get("run") or [{}])[-1]
    mirrored = (run.get("config") or {}).get("update") or {}
    return _Mirror(
        name=_name_of(mirrored, run.get("run_id") or path.stem),
        where=str(path),
        is_finished="exit" in found and not found["exit"][-1].get("exit_code"),
        mirrored=mirrored,
        history=lambda: [each["item"] for each in found.get("history", ())],
    )


def _on_server(project: str) -> list[_Mirror]:
    """Ask the server of W&B for the runs of ``ENTITY/PROJECT``; every row of them is read when it is used."""
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

    def history_of(run: Any) -> Callable[[], Iterable[Row]]:
        @cache
        def history() -> Iterable[Row]:
            try:
                return list(run.scan_history(use_cache=False))  # a run that was mirrored again has other rows
            except Exception as error:
                raise UserError(f"cannot read the history of W&B run {run.id}: {one_line(error)}") from None

        return history

    return [
        _Mirror(
            name=_name_of(run.config, run.id),
            where=f"W&B run {project}/{run.id}",
            is_finished=run.state == "finished",
            mirrored=run.config,
            history=history_of(run),
        )
        for run in found
    ]


def _name_of(mirrored: Mapping[str, Any], run_id: str) -> str:
    """Return the name of the run's folder; W&B's id where a mirror does not say it. Agents choose ids themselves."""
    return str(mirrored.get(FOLDER) or run_id)


_SOURCES: Mapping[str, tuple[str, Callable[[str], list[_Mirror]]]] = {  # with an example of a place
    "wandb-files": ("results/runs", _in_files),
    "wandb": ("ENTITY/PROJECT", _on_server),
}


def _as_recorded(value: Any) -> Any:
    return _NOT_NUMBERS.get(value, value) if isinstance(value, str) else value
