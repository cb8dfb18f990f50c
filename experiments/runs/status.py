"""The state of a run, read from its folder alone."""

import re
from enum import StrEnum
from pathlib import Path

from experiments.config.errors import one_line
from experiments.runs.atomic_files import load_json
from experiments.runs.json_lines import LastRow
from experiments.runs.run_folder import CHECKPOINT_FILE, RunFolder


class State(StrEnum):
    """The states of a run; a stopped one can be resumed."""

    DONE = "done"
    RUNNING = "running"
    FAILED = "failed"
    STOPPED = "stopped"
    NEW = "not started"


def state_of(folder: RunFolder) -> State:
    """Return the state of the run in ``folder``, which may not exist."""
    if folder.is_done():
        return State.DONE
    if folder.is_locked():
        return State.RUNNING
    if folder.failure_path.exists() or _reports(folder):
        return State.FAILED
    return State.STOPPED if folder.config_path.exists() else State.NEW


def saved_step(folder: RunFolder) -> int | None:
    """Return the step of the newest checkpoint, None where there is none."""
    names = (path.parent.name for path in folder.checkpoints_path.glob(f"step-*/{CHECKPOINT_FILE}"))
    found = (re.match(r"step-(\d+)", name) for name in names)
    return max((int(match[1]) for match in found if match), default=None)


def last_step(folder: RunFolder) -> int:
    """Return how many steps are recorded."""
    return int(LastRow(folder.steps_path).read().get("step", -1)) + 1


def failure_reason(folder: RunFolder) -> str:
    """Return why the last attempt failed, in one line; empty if it is unknown."""
    failure = load_json(folder.failure_path)
    if failure:
        return f"rank {failure.get('rank')} failed: {failure.get('message')}"
    reports = [load_json(path) for path in _reports(folder)]
    return next((one_line(f"{report.get('type')}: {report.get('message')}") for report in reports if report), "")


def failure_log(folder: RunFolder) -> Path | None:
    """Return the most detailed file on a failure; None if there is none."""
    named = load_json(folder.failure_path).get("log")
    candidates = [*([Path(named)] if named else []), *_reports(folder), run_log(folder)]
    return next((path for path in candidates if path.exists()), None)


def run_log(folder: RunFolder) -> Path:
    """Return the file of the output of a sweep's run that has its own process."""
    return folder.ranks_path / "run.log"


def _reports(folder: RunFolder) -> list[Path]:
    return sorted(folder.errors_path.glob("rank*.json"))
