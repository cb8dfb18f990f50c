"""One run from a checked configuration to DONE, wherever its workers are."""

import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from rich.console import Console

import data
from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig, to_yaml
from experiments.launching.launch import launch
from experiments.launching.process_lifetime import die_with_parent
from experiments.launching.rank_environment import RankEnvironment
from experiments.launching.rank_process import recorded_errors
from experiments.runs.atomic_files import load_json, write_atomic
from experiments.runs.folder_lock import FolderInUse
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.stop_signals import EXIT_SAVED, stop_signals
from experiments.tracking.progress import watch
from experiments.tracking.wandb_process import mirrored
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
    """Return what to call a run on the terminal."""
    return f"{config.model.name} on {config.dataset.name}, {config.sparsifier.name}, seed {config.seed}"


def execute(config: TrainConfig, watcher: Watcher = show_progress, *, folder: RunFolder | None = None) -> bool:
    """Run ``config`` with workers of its own, or in this process when they are simulated.

    Args:
        watcher: What goes on beside the run.
        folder: Where the run leaves its records, if not in the folder of its name.

    Returns:
        False where the folder holds this very run, finished, so that there was nothing to do.

    Raises:
        UserError: the folder cannot be written or is in use.
        RankFailure: a worker failed.
        SystemExit: a signal stopped the run, which is saved: 128 + 15 for SIGTERM, EXIT_SAVED for SIGUSR1.
    """
    folder = folder or folder_of(config)
    with ExitStack() as owned:
        if _is_ours(config, folder, owned):
            if folder.is_done():
                return False
            _prepare(config, folder)
            owned.enter_context(mirrored(config.tracking, folder))
            owned.enter_context(watcher(config, folder))
        _start_workers(config, folder)
        _tell_beginning(folder)
        if not folder.is_done():
            raise _stopped(folder)
    return True


def _is_ours(config: TrainConfig, folder: RunFolder, owned: ExitStack) -> bool:
    """Claim the folder; return False where another of the run's nodes, with the same disk, was first.

    That node prepares the folder before it meets the others, and shows the progress.
    """
    try:
        owned.enter_context(folder.claim())
    except FolderInUse:
        if config.cluster.nnodes == 1:
            raise
        return False
    return True


def _start_workers(config: TrainConfig, folder: RunFolder) -> None:
    if config.cluster.simulated:
        with stop_signals.recorded(), recorded_errors(folder.path, 0):
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
    )


def join(config: TrainConfig, ranks: RankEnvironment) -> bool:
    """Be one of the ranks that torchrun or srun started; rank 0 owns the folder.

    Returns:
        False where the run was finished before.
    """
    ranks.export()
    die_with_parent(how=signal.SIGKILL)
    start_group(config)
    folder = folder_of(config)
    finished = True
    with ExitStack() as owned:
        if _share(_take_folder(config, folder, owned) if ranks.rank == 0 else None):
            return False
        if ranks.rank == 0:
            owned.enter_context(mirrored(config.tracking, folder))
            owned.enter_context(show_progress(config, folder))
        owned.enter_context(recorded_errors(folder.path, ranks.rank))
        owned.enter_context(stop_signals.recorded())
        finished = run_rank(config, folder, sys.argv)
        if ranks.rank == 0:
            _tell_beginning(folder)
    if not finished:
        raise _stopped(folder)
    return True


def _take_folder(config: TrainConfig, folder: RunFolder, owned: ExitStack) -> bool | UserError:
    """Claim and prepare the folder of a run; return whether it was finished before, or why it cannot be had."""
    try:
        owned.enter_context(folder.claim())
        if not folder.is_done():
            _prepare(config, folder)
        return folder.is_done()
    except UserError as error:
        return error


def _share(found: bool | UserError | None) -> bool:
    """Return on all ranks what rank 0 found, or raise it."""
    answer = gather_objects(found)[0]
    if isinstance(answer, UserError):
        raise answer
    return bool(answer)


def _prepare(config: TrainConfig, folder: RunFolder) -> None:
    write_atomic(folder.config_path, to_yaml(config))
    write_atomic(folder.path / "command.txt", "\n".join(sys.argv) + "\n")


def _tell_beginning(folder: RunFolder) -> None:
    """Say where a run went on, and which checkpoints it could not use."""
    manifest = load_json(folder.manifest_path)
    for line in manifest.get("passed_over", ()):
        print(f"passed over: {line}", file=sys.stderr)
    if manifest.get("began_at_step"):
        print(f"went on from step {manifest['began_at_step']}: {folder.path}", file=sys.stderr)


def _stopped(folder: RunFolder) -> SystemExit:
    """Return the exit of a run that a signal stopped; SystemExit passes through a sweep's ``except Exception``."""
    found = sorted(folder.checkpoints_path.glob("step-*"))
    saved = f"saved as {found[-1]}" if found else "saved"
    print(f"stopped by a signal and {saved}: the same command goes on", file=sys.stderr)
    asked = stop_signals.number
    return SystemExit(128 + asked if asked == signal.SIGTERM else EXIT_SAVED)
