"""Carry out one run, from a checked configuration to its last file, with real or simulated workers."""

import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import torch.distributed as dist
from rich.console import Console

import data
from experiments.config.errors import UserError, one_line_with_type
from experiments.config.method_names import method_of
from experiments.config.schema import TrainConfig, to_yaml
from experiments.config.stopping import NOTHING_SAVED, exit_code, name_of
from experiments.launching.failures import RankFailure
from experiments.launching.launch import launch
from experiments.launching.process_lifetime import die_with_parent
from experiments.launching.rank_environment import RankEnvironment
from experiments.launching.rank_process import recorded_errors
from experiments.launching.watching.joined_watch import watched_rank
from experiments.runs.atomic_files import disk_errors, load_json, write_atomic
from experiments.runs.checkpointing import own_checkpoints
from experiments.runs.finished_requests import unmet_request
from experiments.runs.lock import FolderInUse
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.status import judge
from experiments.runs.stop_signals import stop_signals
from experiments.tracking.progress import watch
from experiments.tracking.wandb_process import mirrored
from experiments.training.devices import note_of_idle_gpus
from experiments.training.groups import in_words
from experiments.training.preflight import check_same_data
from experiments.training.rank_main import run_rank, start_group
from experiments.training.tasks import steps_per_epoch
from micro.comm import gather_objects

Watcher = Callable[[TrainConfig, RunFolder], AbstractContextManager[None]]


def num_steps(config: TrainConfig) -> int:
    """Return how many steps a run takes."""
    info = data.info(config.dataset.name, config.dataset.root, **config.dataset.settings)
    return config.epochs * steps_per_epoch(config, info)


def show_progress(config: TrainConfig, folder: RunFolder) -> AbstractContextManager[None]:
    """Draw the progress of one run on the terminal."""
    return watch(folder.path, total_steps=num_steps(config), label=label(config), console=Console(stderr=True))


def label(config: TrainConfig) -> str:
    """Return the name of a run on the terminal."""
    return f"{config.model.name} on {config.dataset.name}, {method_of(config)}, seed {config.seed}"


def execute(config: TrainConfig, watcher: Watcher = show_progress, *, folder: RunFolder | None = None) -> bool:
    """Run ``config`` with workers of its own, or in this process when they are simulated.

    Args:
        watcher: Returns a context that lasts as long as the run, and shows its progress.
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
        if config.cluster.simulated:
            owned.enter_context(folder.claim())
        elif folder.is_locked():  # rank 0 claims it; this is so that no ranks are started in vain
            raise FolderInUse(folder.path, folder.owner())
        if _is_done(config, folder):
            return False
        _prepare(config, folder)
        _print_note(note_of_idle_gpus(config))
        owned.enter_context(mirrored(config.tracking, folder))
        owned.enter_context(watcher(config, folder))
        before = _manifest_time(folder)
        try:
            _start_workers(config, folder)
        except RankFailure:
            if folder.is_locked():  # another process was first
                raise FolderInUse(folder.path, folder.owner()) from None
            raise
        if _manifest_time(folder) != before:  # else the run was stopped before its first step
            _print_resume(config, folder)
        if not folder.is_done():
            raise _stopped(folder)
    return True


def _is_done(config: TrainConfig, folder: RunFolder) -> bool:
    """Return whether a run is finished.

    Raises:
        UserError: it is, and its folder is no longer whole, or it has not what is asked for now.
    """
    if not folder.is_done():
        return False
    problem = judge(folder).problem
    if problem and config.resume != "scratch":
        choice = "add resume=scratch to start again (what is there moves to attempts/)"
        raise UserError(f"the run was finished, and is damaged: {problem}; {choice}")
    if problem:
        folder.set_aside_ending()
    elif folder.checkpoints_path.exists():  # a kill right after DONE left them
        own_checkpoints(config, folder).remove_all()
    if not problem and (unmet := unmet_request(config, folder)):
        raise UserError(unmet)
    return not problem


def _start_workers(config: TrainConfig, folder: RunFolder) -> None:
    if config.cluster.simulated:
        with recorded_errors(folder.path, 0), disk_errors(folder.path):
            run_rank(config, folder, sys.argv)
        return
    launch(
        folder.path,
        module="experiments.training.rank_main",
        nproc_per_node=config.cluster.nproc_per_node,
        nnodes=config.cluster.nnodes,
        rdzv_endpoint=config.cluster.rdzv_endpoint,
        run_id=folder.path.name,
        max_restarts=config.cluster.max_restarts,
        timeout_s=config.cluster.timeout_s,
    )


def join(config: TrainConfig, ranks: RankEnvironment) -> bool:
    """Run one of the ranks that torchrun or srun started; rank 0 owns the folder.

    Returns:
        False if the run was finished before.
    """
    ranks.export()
    die_with_parent(how=signal.SIGKILL)
    device, _ = start_group(config)
    config.cluster.device = device.type  # auto is what the ranks have found
    folder = folder_of(config)
    finished = True
    with ExitStack() as owned:
        if _from_rank_0(_claim_and_prepare(config, folder, owned) if ranks.rank == 0 else None):
            dist.destroy_process_group()  # its threads would abort some rank's exit
            return False
        if ranks.rank == 0:
            _print_note(note_of_idle_gpus(config))
            owned.enter_context(mirrored(config.tracking, folder))
            owned.enter_context(show_progress(config, folder))
        owned.enter_context(watched_rank(folder.path, ranks.rank, config.cluster.timeout_s))
        owned.enter_context(recorded_errors(folder.path, ranks.rank))
        owned.enter_context(disk_errors(folder.path))
        owned.enter_context(stop_signals.recorded())
        finished = run_rank(config, folder, sys.argv)
        if ranks.rank == 0:
            _print_resume(config, folder)
    if not finished:
        raise _stopped(folder)
    return True


def _claim_and_prepare(config: TrainConfig, folder: RunFolder, owned: ExitStack) -> bool | Exception:
    """Claim and prepare the folder of a run; return whether it was finished before, or the error, for all ranks."""
    try:
        check_same_data([config])  # only now the device, and with it the folder, is known
        owned.enter_context(folder.claim())
        if not _is_done(config, folder):
            _prepare(config, folder)
            return False
        return True
    except UserError as error:
        return error
    except Exception as error:  # the other ranks would wait for this one
        traceback.print_exc()
        return RuntimeError(f"rank 0: {one_line_with_type(error)}")


def _from_rank_0(found: bool | Exception | None) -> bool:
    """Return rank 0's value on all ranks; raise it if it is an error."""
    answer = gather_objects(found)[0]
    if isinstance(answer, Exception):
        raise answer
    return bool(answer)


def _prepare(config: TrainConfig, folder: RunFolder) -> None:
    folder.make()
    folder.set_aside_reports()
    write_atomic(folder.config_path, to_yaml(config))
    write_atomic(folder.path / "command.txt", "\n".join(sys.argv) + "\n")


def _print_note(line: str) -> None:
    if line:
        print(line, file=sys.stderr)


def _manifest_time(folder: RunFolder) -> int | None:
    return folder.manifest_path.stat().st_mtime_ns if folder.manifest_path.exists() else None


def _print_resume(config: TrainConfig, folder: RunFolder) -> None:
    """Print the step from which a run resumed, and the checkpoints that it could not use."""
    manifest = load_json(folder.manifest_path)
    for line in manifest.get("passed_over", ()):
        print(f"checkpoint not used: {line}", file=sys.stderr)
    if manifest.get("began_at_step"):
        why = " (resume=scratch is for damaged runs, this one is whole)" if config.resume == "scratch" else ""
        print(f"resumed from step {manifest['began_at_step']}: {folder.path}{why}", file=sys.stderr)
    for group in manifest.get("groups", ())[1:]:
        print(in_words(group, config.world_size), file=sys.stderr)


def _stopped(folder: RunFolder) -> SystemExit:
    """Return the exit of a run that a signal stopped; SystemExit passes through a sweep's ``except Exception``."""
    found = sorted(folder.checkpoints_path.glob("step-*"))
    state = f"saved as {found[-1]}: run the same command to resume" if found else NOTHING_SAVED
    number = stop_signals.number or signal.SIGUSR1  # 0: another node received it
    print(f"stopped by {name_of(number) if stop_signals.number else 'a signal'}, {state}", file=sys.stderr)
    return SystemExit(exit_code(number))
