"""Carry out a study on this machine: the unfinished runs, one after another or several at once."""

from rich.console import Console

from experiments.config.schema import TrainConfig
from experiments.runs.run_folder import folder_of
from experiments.runs.status import State, state_of
from experiments.sweeps.live_table import LiveTable
from experiments.sweeps.num_jobs import num_at_once
from experiments.sweeps.outcome import Outcome
from experiments.sweeps.parallel_runs import ParallelSweep
from experiments.sweeps.sequential_runs import run_one_by_one


def run_all(configs: list[TrainConfig], console: Console, *, jobs: str = "auto", on_error: str = "continue") -> Outcome:
    """Carry out the runs that are not finished.

    Args:
        configs: The runs of the study, each with its own folder.
        jobs: How many run at once, see ``num_at_once``.
        on_error: continue, or stop: after a failure no run is started, and running ones are completed.

    Raises:
        UserError: ``jobs`` is out of its range.
    """
    waiting = [config for config in configs if state_of(folder_of(config)) != State.DONE]
    at_once = num_at_once(waiting, jobs)
    if at_once == 1:
        return run_one_by_one(configs, console, on_error)
    with LiveTable(console, total=len(configs), done=len(configs) - len(waiting), num_at_once=at_once) as table:
        return ParallelSweep(waiting, table, at_once=at_once, on_error=on_error).run()
