"""Carry out one run, from a checked configuration to its last file, with real or simulated workers."""

import socket
import sys
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

import data
from experiments.config.command_line import MISTAKE
from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.launching.elastic import start_ranks
from experiments.launching.failures import RankFailure
from experiments.launching.process_lifetime import die_with_parent
from experiments.launching.rank_environment import RankEnvironment
from experiments.runs.atomic_files import disk_errors
from experiments.runs.checkpoints import remove_all
from experiments.runs.lock import FolderInUse
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.stop_signals import stop_signals
from experiments.training.devices import note_of_idle_gpus
from experiments.training.preflight import check_runs
from experiments.training.rank_main import is_finished, print_resume, start_group, stopped, take_part, variables_of
from experiments.training.tasks import steps_per_epoch
from micro.objects import gather_objects


def num_steps(config: TrainConfig) -> int:
    """Return how many steps a run takes."""
    info = data.info(config.dataset.name, config.dataset.root, **config.dataset.settings)
    return config.epochs * steps_per_epoch(config, info)


def execute(config: TrainConfig, *, folder: RunFolder | None = None) -> bool:
    """Run ``config`` with workers of its own, or in this process when they are simulated.

    Args:
        folder: The run folder, if not the one that the configuration names.

    Returns:
        False if the run was finished before, so that there was nothing to do.

    Raises:
        UserError: the folder cannot be written or is in use.
        RankFailure: a worker failed.
        SystemExit: a signal stopped the run, which is saved once it takes steps; stopping.exit_code has the codes.
    """
    folder = folder or folder_of(config)
    with ExitStack() as owned:
        owned.enter_context(disk_errors(folder.path))
        owned.enter_context(stop_signals.recorded())
        if is_finished(config, folder):
            if folder.checkpoints_path.exists():  # a kill right after DONE left them
                with folder.claim():
                    remove_all(folder)
            return False
        if folder.is_locked():  # rank 0 claims it; this is so that no ranks are started in vain
            raise FolderInUse(folder.path)
        _print_note(note_of_idle_gpus(config))
        before = _manifest_time(folder)
        number = 0
        if config.cluster.simulated:
            with ExitStack() as claimed:
                take_part(config, folder, sys.argv, claimed)
        else:
            number = _start_workers(config, folder)
            if _manifest_time(folder) != before:  # else the run was stopped before its first step
                print_resume(config, folder)
        if number and not folder.is_done():
            raise stopped(folder, number)
    return True


def _start_workers(config: TrainConfig, folder: RunFolder) -> int:
    """Carry out a run with ranks of this launcher; return the signal that stopped it, 0 if none did."""
    module, variables = "experiments.training.rank_main", variables_of(config, sys.argv)
    folder.make()
    try:
        return start_ranks(folder, module, config.cluster, env=variables)
    except RankFailure:
        if folder.is_locked():  # another process was first
            raise FolderInUse(folder.path) from None
        raise


def join(config: TrainConfig, ranks: RankEnvironment) -> bool:
    """Run one of the ranks that torchrun or srun started; rank 0 owns the folder.

    Returns:
        False if the run was finished before.

    Raises:
        HostProblem: the run cannot start on a host; on rank 0, the others exit.
        UserError: rank 0 cannot use the folder; on all ranks alike.
        SystemExit: a signal stopped the run, which is saved.
    """
    ranks.export()
    die_with_parent()
    device, _ = start_group(config)
    config.cluster.device = device.type  # auto is what the ranks have found
    folder = folder_of(config)
    _check_each_host(config, ranks)
    with ExitStack() as owned:
        if ranks.rank == 0:
            _print_note(note_of_idle_gpus(config))
        return take_part(config, folder, sys.argv, owned)


class HostProblem(UserError):
    """A run that cannot start on one of its hosts."""


def _check_each_host(config: TrainConfig, ranks: RankEnvironment) -> None:
    """Check the run on each host, by its first rank; where it cannot start on one, rank 0 says so and all end.

    Raises:
        HostProblem: on rank 0.
        SystemExit: on the others.
    """
    problem = None
    try:
        if ranks.local_rank == 0:
            check_runs([config])
    except UserError as error:
        problem = str(error)
    found: list[Any] = gather_objects((socket.gethostname(), problem))
    if first := next(((host, why) for host, why in found if why), None):
        dist.destroy_process_group()
        if ranks.rank:
            raise SystemExit(MISTAKE)
        raise HostProblem(f"{first[1]} (on host {first[0]})")


def _print_note(line: str) -> None:
    if line:
        print(line, file=sys.stderr)


def _manifest_time(folder: RunFolder) -> int | None:
    return folder.manifest_path.stat().st_mtime_ns if folder.manifest_path.exists() else None
