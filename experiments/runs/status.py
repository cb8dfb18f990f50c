"""Read the state of a run from its folder, for all commands; and DONE, the last file of a run."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from experiments.config.errors import one_line
from experiments.runs.checkpoints import usable
from experiments.runs.files import Damaged, Digest, digest_of, load_json, reason, to_json, write_json
from experiments.runs.records import last_row
from experiments.runs.run_folder import CHECKPOINT_FILE, RunFolder

_KEY = "sha256"  # of all else in DONE


class State(StrEnum):
    """The states of a run; a stopped one can be resumed, a damaged one has lost something, SLURM knows a queued one."""

    DONE = "done"
    RUNNING = "running"
    DAMAGED = "damaged"
    FAILED = "failed"
    STOPPED = "stopped"
    QUEUED = "queued"
    NEW = "not started"


@dataclass(frozen=True, slots=True)
class Status:
    """What a run's folder is; ``problem`` says in one line what is missing or damaged, empty where nothing is."""

    state: State
    problem: str = ""


def status_of(folder: RunFolder) -> Status:
    """Return what the folder of a run is, which may not exist.

    A finished run is done only if all of it is there as it was written. An unfinished one is damaged if it has
    checkpoints, and none whose files and rows are there; the content of a checkpoint is verified where it is read.
    """
    if folder.is_done():
        try:
            _check_done(folder)
        except Damaged as error:
            return Status(State.DAMAGED, str(error))
        return Status(State.DONE)
    if folder.is_locked():
        return Status(State.RUNNING)
    found, problems = usable(folder)
    if problems and not found:
        return Status(State.DAMAGED, f"no checkpoint can be used: {'; '.join(problems)}")
    if folder.failure_path.exists():
        return Status(State.FAILED)
    return Status(State.STOPPED if folder.config_path.exists() else State.NEW)


def state_of(folder: RunFolder) -> State:
    """Return the state of the run in ``folder``, which may not exist."""
    return status_of(folder).state


def saved_step(folder: RunFolder) -> int | None:
    """Return the step of the newest checkpoint, None where there is none."""
    names = (path.parent.name for path in folder.checkpoints_path.glob(f"step-*/{CHECKPOINT_FILE}"))
    return max((int(name[5:]) for name in names if name[5:].isdecimal()), default=None)


def last_step(folder: RunFolder) -> int:
    """Return how many steps are recorded."""
    step = last_row(folder.steps_path).get("step")
    return step + 1 if isinstance(step, int) else 0


def failure_reason(folder: RunFolder) -> str:
    """Return why the last attempt failed, in one line; empty if it is unknown."""
    failure = load_json(folder.failure_path)
    return one_line(f"rank {failure.get('rank')} failed: {failure.get('message')}") if failure else ""


def failure_log(folder: RunFolder) -> Path | None:
    """Return the most detailed file on a failure; None if there is none."""
    named = load_json(folder.failure_path).get("log")
    candidates = [*([Path(named)] if isinstance(named, str) and named else []), folder.log_path, folder.failure_path]
    return next((path for path in candidates if path.exists()), None)


def write_done(folder: RunFolder, summary: Mapping[str, Any], records: Mapping[str, Digest]) -> None:
    """Mark a run as done: DONE has a summary of its end, and says what the other files hold.

    Raises: Damaged: a file was removed or changed while the run went on; CannotWrite; FolderLost.
    """
    folder.check_owned()
    for name, digest in records.items():
        digest.check(folder.path / name)
    files = dict(records)
    for path in (folder.config_path, folder.manifest_path):
        try:
            files[path.name] = digest_of(path)
        except OSError as error:
            raise Damaged(f"{path} is missing at the end of the run: {reason(error)}") from None
    content = {**summary, "files": {name: digest._asdict() for name, digest in files.items()}}
    plain = json.loads(to_json(content))
    write_json(folder.done_path, {**plain, _KEY: _sha256(plain)})


def _check_done(folder: RunFolder) -> None:
    """Check that a finished run is whole. Raises: Damaged."""
    done = load_json(folder.done_path)
    if done.pop(_KEY, None) != _sha256(done):
        raise Damaged(f"{folder.done_path} has changed since it was written")
    for name, digest in done["files"].items():
        Digest(**digest).check(folder.path / name)


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
