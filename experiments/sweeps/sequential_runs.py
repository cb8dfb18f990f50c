"""Carry out the runs of a sweep one after another, in this process."""

from collections import deque

from rich.console import Console

from experiments.config.command_line import INTERRUPTED
from experiments.config.schema import TrainConfig
from experiments.config.stopping import exit_code, handled, raise_stop
from experiments.runs.atomic_files import DiskError
from experiments.runs.lock import FolderInUse
from experiments.runs.run_folder import folder_of
from experiments.runs.status import State, state_of
from experiments.runs.stop_signals import stop_signals
from experiments.sweeps.attempt import attempt
from experiments.sweeps.held_runs import HeldRuns
from experiments.sweeps.outcome import Outcome
from experiments.sweeps.progress import SweepProgress
from experiments.tracking.progress import print_plain
from experiments.training.runner import label, num_steps


def run_one_by_one(configs: list[TrainConfig], console: Console, on_error: str) -> Outcome:
    """Carry out the unfinished runs and show the progress; arguments are those of ``local_sweep.run_all``.

    A run that another process holds is left for the end, and then waited for.
    """
    progress, outcome = SweepProgress(len(configs), console), Outcome()
    folders = [folder_of(config) for config in configs]
    finished_before = {folder.path for folder in folders if state_of(folder) == State.DONE}
    waiting, held = deque(configs), HeldRuns(lambda line: print_plain(console, line))
    with handled(raise_stop):
        while waiting or held:
            try:
                waiting.extend([] if waiting else held.wait())
                config = waiting.popleft()
                folder = folder_of(config)
                if state_of(folder) == State.DONE:
                    progress.skip()
                    if folder.path not in finished_before:
                        outcome.num_elsewhere += 1
                        print_plain(console, f"done by another process: {folder.path.name}")
                    continue
                why = attempt(
                    config, folder, lambda c, f: progress.watch(f.path, total_steps=num_steps(c), label=label(c))
                )
            except FolderInUse as error:
                held.add(config, error.holder)
                continue
            except DiskError as error:
                why, outcome.has_disk_error = str(error), True
            except KeyboardInterrupt:
                outcome.stopped = INTERRUPTED
                break
            except SystemExit as stop:
                outcome.stopped = int(stop.code or 1)
                break
            if why:
                print_plain(console, f"failed: {folder.path.name}: {why}")
                outcome.add_failure(folder, why)
            if stop_signals.number:  # received after the last step
                outcome.stopped = exit_code(stop_signals.number)
                break
            if why and (on_error == "stop" or outcome.has_disk_error):
                break
    outcome.count_left(folders)
    return outcome
