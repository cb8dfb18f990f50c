"""List the runs of a study with state and progress, and find those that may be removed."""

import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from experiments.config.errors import UserError
from experiments.reports.measures import in_words
from experiments.runs.files import load_json, reason
from experiments.runs.records import last_row
from experiments.runs.run_folder import FolderInUse, RunFolder
from experiments.runs.status import State, Status, failure_reason, last_step, saved_step, state_of, status_of


def lines_of(folders: Collection[RunFolder], queued: Mapping[RunFolder, str] = MappingProxyType({})) -> list[str]:
    """Return a line for each run, and one that counts them.

    Args:
        queued: the runs in SLURM's queue, each with what is known of its task.
    """
    lines, states = [], []
    for folder in folders:
        status = status_of(folder)  # reads all records of a finished run
        states.append(_state(status.state, is_queued=folder in queued))
        waits = queued[folder] if states[-1] == State.QUEUED else ""
        words = "; ".join(filter(None, (waits, describe(folder, status))))
        lines.append(f"{states[-1]:12} {_steps(folder):>9}  {folder.path}  {words}".rstrip())
    return [*lines, counted(states)]


def counted(states: Iterable[State]) -> str:
    """Return how many runs are in which state, ``3 runs: 2 done, 1 failed``."""
    counts = Counter(states)
    words = ", ".join(f"{counts[state]} {state}" for state in State if counts[state])
    return f"{counts.total()} runs: {words}"


def describe(folder: RunFolder, status: Status) -> str:
    """Return a short description of a run: its measure, who runs it, its damage, why it failed, where it resumes."""
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
                folder.done_path.unlink(missing_ok=True)  # first: a half-removed run must not look finished
                shutil.rmtree(folder.path)
        except FolderInUse:
            stayed.append(folder)
        except OSError as error:
            raise UserError(f"cannot remove {folder.path}: {reason(error)}; remove it by hand") from None
    return stayed


def _state(state: State, *, is_queued: bool) -> State:
    """Return the state of a run; one in the queue may have begun, or be done, since it was asked for."""
    return State.QUEUED if is_queued and state not in (State.DONE, State.RUNNING) else state


def _steps(folder: RunFolder) -> str:
    """Return the steps recorded and those of the run, if its manifest has them."""
    total = load_json(folder.manifest_path).get("steps")
    done = last_step(folder)
    return f"{done}/{total}" if total else (str(done) if done else "")
