"""The runs of a study: a line for each with its state and what a user asks next, and which of them may be removed."""

import shutil
from collections import Counter
from collections.abc import Collection, Iterable

from experiments.config.errors import UserError
from experiments.reports.measures import in_words
from experiments.runs.files import load_json, reason
from experiments.runs.records import last_row
from experiments.runs.run_folder import FolderInUse, RunFolder
from experiments.runs.status import State, failure_reason, last_step, saved_step, state_of, status_of


def lines_of(folders: Collection[RunFolder], queued: Collection[RunFolder] = ()) -> list[str]:
    """Return a line for each run, and one that counts them."""
    lines = [f"{_state(each, queued):12} {_steps(each):>9}  {each.path}  {describe(each)}".rstrip() for each in folders]
    return [*lines, counted(folders, queued)]


def counted(folders: Iterable[RunFolder], queued: Collection[RunFolder] = ()) -> str:
    """Return how many runs are in which state, ``3 runs: 2 done, 1 failed``."""
    counts = Counter(_state(folder, queued) for folder in folders)
    states = ", ".join(f"{counts[state]} {state}" for state in State if counts[state])
    return f"{counts.total()} runs: {states}"


def describe(folder: RunFolder) -> str:
    """Return a short description of a run: its measure, who runs it, its damage, why it failed, where it resumes."""
    status = status_of(folder)
    match status.state:
        case State.DAMAGED:
            return status.problem
        case State.DONE:
            return in_words(last_row(folder.epochs_path))
        case State.RUNNING:
            return str(folder.owner() or "")
        case State.FAILED:
            return failure_reason(folder)
        case State.NEW:
            return ""
    step = saved_step(folder)
    return "no checkpoint: starts from step 0" if step is None else f"resumes from step {step}"


def removable(folders: Iterable[RunFolder], *, finished_too: bool = False) -> list[RunFolder]:
    """Return the folders of runs that failed, were stopped or are damaged; with ``finished_too`` all that ended.

    A run that was finished, and is damaged, counts as finished: it may hold the only weights.
    """
    states = (State.FAILED, State.STOPPED, State.DAMAGED)
    return [each for each in folders if (finished_too if each.is_done() else state_of(each) in states)]


def remove(folders: Iterable[RunFolder]) -> list[RunFolder]:
    """Remove the folders; return those that stay because a process uses them. Raises: UserError: one cannot be."""
    stayed = []
    for folder in folders:
        try:
            with folder.locked():
                folder.done_path.unlink(missing_ok=True)  # first: it must not look like a finished run halfway
                shutil.rmtree(folder.path)
        except FolderInUse:
            stayed.append(folder)
        except OSError as error:
            raise UserError(f"cannot remove {folder.path}: {reason(error)}; remove it by hand") from None
    return stayed


def _state(folder: RunFolder, queued: Collection[RunFolder]) -> State:
    """Return the state of a run; one in the queue may have begun, or be done, since it was asked for."""
    state = state_of(folder)
    return State.QUEUED if folder in queued and state not in (State.DONE, State.RUNNING) else state


def _steps(folder: RunFolder) -> str:
    """Return the steps recorded and those of the run, if its manifest has them."""
    total = load_json(folder.manifest_path).get("steps")
    done = last_step(folder)
    return f"{done}/{total}" if total else (str(done) if done else "")
