"""Tables of a study: what it will run, the state of each run, and the failures."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.config.method_names import method_of
from experiments.config.schema import TrainConfig
from experiments.reports.measures import in_words
from experiments.runs.atomic_files import load_json
from experiments.runs.json_lines import LastRow
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.status import State, failure_reason, judge, last_step, saved_step, state_of
from experiments.sweeps.outcome import FailedRun
from experiments.tracking.progress import is_terminal

_STYLES = {
    State.DONE: "green",
    State.RUNNING: "cyan",
    State.DAMAGED: "red",
    State.FAILED: "red",
    State.STOPPED: "yellow",
    State.QUEUED: "blue",
    State.NEW: "dim",
}
_WIDE = 10_000  # width in characters outside a terminal, so that a row stays one line
Kind = tuple[str, str, str, str, str]


def show(table: Table, console: Console) -> None:
    """Print a table; in a file or a pipe every row is one line."""
    screen = console if is_terminal(console) else Console(file=console.file, width=_WIDE)
    screen.print(table)


def state_with_queue(folder: RunFolder, queued: Collection[RunFolder]) -> State:
    """Return the state of a run, where those that wait in a queue, or whose job has just begun, are known."""
    state = state_of(folder)
    return State.QUEUED if folder in queued and state not in (State.DONE, State.RUNNING) else state


def plan_table(name: str, configs: list[TrainConfig], queued: Collection[RunFolder] = ()) -> Table:
    """Return what a study will run: a row per model, data set, method, density and number of workers."""
    plans: defaultdict[Kind, Counter[str]] = defaultdict(Counter)
    for config in configs:
        plans[_kind(config)][_plan(folder_of(config), queued)] += 1
    sums = sum(plans.values(), Counter())
    table = Table(title=Text(f"{name}: {len(configs)} runs", style="table.title"), show_footer=True)
    for heading in ("model", "dataset", "method", "density", "workers"):
        table.add_column(heading, overflow="fold")
    shown = ["done", "to resume", "to run"]
    shown += [heading for heading in ("running", "queued", "damaged") if sums[heading]]
    for heading in shown:
        table.add_column(heading, str(sums[heading]), justify="right")
    for kind, counts in plans.items():
        table.add_row(*kind, *(str(counts[heading] or "") for heading in shown))
    return table


def status_table(configs: list[TrainConfig], queued: Collection[RunFolder] = ()) -> Table:
    """Return a row for each run: its state, the steps recorded, and its measure, failure, damage or checkpoint."""
    folders = [folder_of(config) for config in configs]
    counts = Counter(state_with_queue(folder, queued) for folder in folders)
    num_unverified = sum(not judge(folder).is_verified for folder in folders)
    note = f"{num_unverified} not verified: written by an earlier version" if num_unverified else None
    table = Table("run", "state", "step", "", title=count_states(counts), caption=note)
    for folder in folders:
        state = state_with_queue(folder, queued)
        name = Text(folder.path.name, overflow="fold")
        table.add_row(name, Text(state, _STYLES[state]), _steps(folder), Text(describe(folder), overflow="fold"))
    return table


def count_states(counts: Counter[State]) -> str:
    """Return how many runs are in which state, ``3 done, 1 failed``."""
    return ", ".join(f"{counts[state]} {state}" for state in State if counts[state])


def failure_table(failures: Iterable[FailedRun]) -> Table:
    """Return all failures: run, why, log."""
    rows = list(failures)
    table = Table("run", "why", "log", title=f"{len(rows)} failed")
    for row in rows:
        table.add_row(*(Text(str(part or ""), overflow="fold") for part in (row.run, row.why, row.log)))
    return table


def removal_table(folders: list[RunFolder]) -> Table:
    """Return the folders to remove: run, state, steps recorded, and its measure, failure or checkpoint."""
    table = Table("run", "state", "steps", "", title=f"{len(folders)} to remove")
    for folder in folders:
        words = Text(describe(folder), overflow="fold")
        table.add_row(Text(str(folder.path), overflow="fold"), str(state_of(folder)), str(last_step(folder)), words)
    return table


def describe(folder: RunFolder) -> str:
    """Return a short description of a run: its measure, who runs it, its damage, why it failed, where it resumes."""
    verdict = judge(folder)
    state = verdict.state
    if state == State.DAMAGED:
        return verdict.problem
    if state in (State.DONE, State.RUNNING):
        owner = folder.owner() if state == State.RUNNING else None
        measured = in_words(LastRow(folder.epochs_path).read())
        return "; ".join(filter(None, (measured, str(owner or ""))))
    if state == State.FAILED:
        return failure_reason(folder)
    if state == State.NEW:
        return ""
    step = saved_step(folder)
    return "no checkpoint: starts from step 0" if step is None else f"resumes from step {step}"


def _kind(config: TrainConfig) -> Kind:
    names = (config.model.name, config.dataset.name, method_of(config))
    return (*names, f"{config.density:g}", str(config.world_size))


def _plan(folder: RunFolder, queued: Collection[RunFolder]) -> str:
    state = state_with_queue(folder, queued)
    if state in (State.DONE, State.RUNNING, State.QUEUED, State.DAMAGED):
        return str(state)
    return "to run" if saved_step(folder) is None else "to resume"


def _steps(folder: RunFolder) -> str:
    """Return the steps recorded and those of the run, if its manifest has them."""
    total = load_json(folder.manifest_path).get("steps")
    done = last_step(folder)
    return f"{done}/{total}" if total else (str(done) if done else "")
