"""The runs of a study in lines of text: state, steps recorded, folder, and what a user asks next."""

from collections import Counter
from collections.abc import Collection, Iterable

from experiments.reports.measures import in_words
from experiments.runs.atomic_files import load_json
from experiments.runs.records import last_row
from experiments.runs.run_folder import RunFolder
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
    if status.state == State.DAMAGED:
        return status.problem
    if status.state == State.DONE:
        return in_words(last_row(folder.epochs_path))
    if status.state == State.RUNNING:
        return str(folder.owner() or "")
    if status.state == State.FAILED:
        return failure_reason(folder)
    if status.state == State.NEW:
        return ""
    step = saved_step(folder)
    return "no checkpoint: starts from step 0" if step is None else f"resumes from step {step}"


def _state(folder: RunFolder, queued: Collection[RunFolder]) -> State:
    """Return the state of a run; one in the queue may have begun, or be done, since it was asked for."""
    state = state_of(folder)
    return State.QUEUED if folder in queued and state not in (State.DONE, State.RUNNING) else state


def _steps(folder: RunFolder) -> str:
    """Return the steps recorded and those of the run, if its manifest has them."""
    total = load_json(folder.manifest_path).get("steps")
    done = last_step(folder)
    return f"{done}/{total}" if total else (str(done) if done else "")
