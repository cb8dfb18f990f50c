"""Carry out one run, from a checked configuration to its last file: as one of its ranks, or with workers of its own.

train, -m, submitit, torchrun and srun come by ``carry_out``, the runs of a sweep by ``execute``.
"""

import json
import socket
import sys
import traceback

from experiments.config.command_line import MISTAKE
from experiments.config.errors import RunFailed, UserError
from experiments.config.keys import to_yaml
from experiments.config.schema import TrainConfig
from experiments.config.stopping import handled, raise_stop
from experiments.launching.elastic import start_ranks
from experiments.launching.failures import RankFailure
from experiments.launching.process_lifetime import die_with_parent, leave
from experiments.launching.rank_environment import RankEnvironment
from experiments.reports.measures import METRICS
from experiments.runs.checkpoints import remove_all
from experiments.runs.files import disk_errors
from experiments.runs.finished_requests import note_of_other_epochs
from experiments.runs.git_state import other_code
from experiments.runs.output import check_outputs
from experiments.runs.records import last_row
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.stop_signals import stop_signals
from experiments.training.group import CannotStart, leave_group, note_of_idle_gpus, start_group
from experiments.training.preflight import check_runs, check_start
from experiments.training.rank_main import RUN, is_finished, print_resume, stopped, take_part
from micro import NonFiniteGradient
from micro.comm.objects import gather_objects


def carry_out(config: TrainConfig, ranks: RankEnvironment | None) -> float | None:
    """Check a run and carry it out, if it is not done; return its last measure.

    Args:
        ranks: which rank this process is, where something else started it.

    Raises:
        UserError: the run cannot start, or its ranks cannot meet.
        RunFailed: it began and failed.
        SystemExit: a signal stopped the run, which is saved once it takes steps; stopping.exit_code has the codes.
    """
    is_first = ranks is None or ranks.rank == 0
    if ranks is None:
        check_runs([config])
    else:  # the rest is checked on each host when the ranks have met
        check_start(config)
    with handled(raise_stop):
        if stop_signals.number:  # received after the last step of a run before this one
            raise_stop(stop_signals.number, None)
        if is_first:
            check_outputs([config])
        try:
            ran = join(config, ranks) if ranks else execute(config)
        except CannotStart:
            raise
        except Exception as error:
            if ranks and not isinstance(error, UserError):
                traceback.print_exc()
                leave(1)  # a normal exit would wait for a peer that may be gone
            if not isinstance(error, UserError | RankFailure | NonFiniteGradient):
                raise
            raise RunFailed(f"{folder_of(config).path.name}: {error}") from error
    folder = folder_of(config)  # ranks have found out on which device they are
    if is_first:
        print(f"{'done' if ran else 'already done'}: {folder.path}")
        if not ran and (line := other_code([folder])):
            print(f"note: {line}", file=sys.stderr)
    row = last_row(folder.epochs_path)
    return next((row[metric.key] for metric in METRICS if row.get(metric.key) is not None), None)


def execute(config: TrainConfig, *, folder: RunFolder | None = None) -> bool:
    """Run ``config`` with workers of its own, or in this process when they are simulated.

    Args:
        folder: of the run, if not the one that the configuration names.

    Returns:
        False if the run was finished before, so that there was nothing to do.

    Raises:
        UserError: the folder cannot be written or is in use.
        RankFailure: a worker failed.
        SystemExit: as carry_out.
    """
    folder = folder or folder_of(config)
    with disk_errors(folder.path), stop_signals.recorded():
        if is_finished(config, folder):
            if folder.checkpoints_path.exists():  # a kill right after DONE left them
                with folder.claim():
                    remove_all(folder)
            return False
        if folder.is_locked():  # rank 0 claims it; this is so that no ranks are started in vain
            raise folder.in_use()
        _print_notes(config)
        if config.cluster.simulated:
            return take_part(config, folder, sys.argv)
        folder.make()
        before, run = _manifest_time(folder), json.dumps({"config": to_yaml(config), "command": sys.argv})
        try:
            number = start_ranks(folder, "experiments.training.rank_main", config.cluster, env={RUN: run})
        except RankFailure:
            if folder.is_locked():  # another process was first
                raise folder.in_use() from None
            raise
        if _manifest_time(folder) != before:  # else the run was stopped before its first step
            print_resume(config, folder)
        if number and not folder.is_done():
            raise stopped(folder, number)
    return True


def join(config: TrainConfig, ranks: RankEnvironment) -> bool:
    """Run one of the ranks that torchrun or srun started; rank 0 owns the folder. Return False if it was finished.

    Raises:
        CannotStart: the run cannot start on a host; on rank 0, the others exit.
        UserError: rank 0 cannot use the folder; on all ranks alike.
        SystemExit: as carry_out.
    """
    ranks.export()
    die_with_parent()
    group = start_group(config)
    config.cluster.device = group[0].type  # auto is what the ranks have found
    problem = None
    try:
        if ranks.local_rank == 0:  # for its host
            check_runs([config])
    except UserError as error:
        problem = f"{error} (on host {socket.gethostname()})"
    for found in gather_objects(problem):
        if found:
            leave_group()
            if ranks.rank:
                raise SystemExit(MISTAKE)
            raise CannotStart(str(found))
    if ranks.rank == 0:
        _print_notes(config)
    return take_part(config, folder_of(config), sys.argv, group)


def _print_notes(config: TrainConfig) -> None:
    if line := note_of_other_epochs(config):
        print(f"note: {line}", file=sys.stderr)
    if line := note_of_idle_gpus(config):
        print(line, file=sys.stderr)


def _manifest_time(folder: RunFolder) -> int | None:
    return folder.manifest_path.stat().st_mtime_ns if folder.manifest_path.exists() else None
