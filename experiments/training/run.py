"""Execute one run, from a checked configuration to its last file: start its workers, or be one of its ranks.

train, -m, submitit, torchrun and srun call ``carry_out``, sweeps call ``execute``. The launcher writes the
configuration into the run's folder and starts this module with ``python -m`` on each rank, which reads it there.
"""

import os
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.config.command_line import MISTAKE
from experiments.config.errors import RunFailed, UserError, one_line_with_type
from experiments.config.keys import from_yaml, to_yaml
from experiments.config.schema import TrainConfig
from experiments.config.stopping import (
    NOTHING_SAVED,
    STOP_SIGNALS,
    end_process,
    exit_code,
    handled,
    name_of,
    raise_stop,
    stop_signals,
)
from experiments.launching.failures import RankFailure, recorded_errors
from experiments.launching.rank_environment import LAUNCHER_PID, RankEnvironment, die_with_parent, shape_of
from experiments.launching.stalls import notes
from experiments.reports.measures import METRICS
from experiments.runs.before_start import check_outputs, note_of_other_epochs, unmet_request
from experiments.runs.checkpoints import leftovers, remove_leftovers
from experiments.runs.files import disk_errors, load_json, write_atomic, write_json
from experiments.runs.manifest import code_of_attempts, collect_manifest, other_code
from experiments.runs.rank_files import save_weights, weights_digest
from experiments.runs.records import last_row
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.status import status_of, write_done
from experiments.tracking.progress import followed
from experiments.training.extending import copy_end, end_to_extend
from experiments.training.group import CannotStart, Group, leave_group, note_of_idle_gpus, start_group
from experiments.training.loop import Trainer
from experiments.training.preflight import check_runs, check_start
from experiments.training.tasks import load_task
from experiments.training.workers import Workers, kind_of_workers
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
                end_process(1)  # a normal exit would wait for a peer that may be gone
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
            if leftovers(folder):  # of a kill right after DONE
                with folder.claim():
                    remove_leftovers(folder)
            return False
        if folder.is_locked():  # rank 0 claims it; this is so that no ranks are started in vain
            raise folder.in_use()
        _print_notes(config)
        if config.cluster.simulated:
            with recorded_errors(folder, rank=0):
                return take_part(config, folder, sys.argv, start_group(config))
        _start_ranks(config, folder)
    return True


def _start_ranks(config: TrainConfig, folder: RunFolder) -> None:
    """Write what the ranks of this node read, start them, and wait for their end. Raises: as ``execute``."""
    from experiments.launching.elastic import start_ranks  # which ranks need not import

    _write_start(config, folder, sys.argv)
    began = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        number = start_ranks(folder, "experiments.training.run", config.cluster)
    except RankFailure:
        if folder.is_locked():  # another process was first
            raise folder.in_use() from None
        raise
    if load_json(folder.manifest_path).get("started", "") >= began:  # else it was stopped before its first step
        print_resume(config, folder)
    if number and not folder.is_done():
        raise stopped(folder, number)


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
    config.cluster.nproc_per_node, config.cluster.nnodes = shape_of(ranks)  # as config.yaml has them, for a rerun
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
    with recorded_errors(folder := folder_of(config), ranks.rank):
        return take_part(config, folder, sys.argv, group)


def take_part(config: TrainConfig, folder: RunFolder, command: list[str], group: Group) -> bool:
    """Carry out a run as one of its ranks, or as all of a simulated one; rank 0 owns the folder meanwhile.

    Args:
        command: what the user typed, for the manifest.
        group: of the ranks, which this one has joined.

    Returns:
        False if the run was finished before.

    Raises:
        UserError: the folder cannot be used; on all ranks alike.
        SystemExit: a signal stopped the run, which is saved; ``exit_code`` has the codes.
    """
    _, store = group
    rank = dist.get_rank() if store else 0
    with disk_errors(folder.path), ExitStack() as owned:
        found = _begin(config, folder, command, owned) if rank == 0 else None
        is_over = gather_objects(found)[0] if store else found
        if isinstance(is_over, Exception):
            raise is_over
        if is_over:
            leave_group()
            return False
        if store:
            owned.enter_context(notes.kept(folder, dist.PrefixStore("notes", store), config.cluster.timeout_s))
        is_done = run_rank(config, folder, command, group)
        if rank == 0:
            print_resume(config, folder)
        if not is_done:
            raise stopped(folder, stop_signals.number)
    return True


def _begin(config: TrainConfig, folder: RunFolder, command: list[str], owned: ExitStack) -> bool | Exception:
    """Claim and prepare the folder of a run; return whether it was finished before, or the error, for all ranks."""
    try:
        owned.enter_context(folder.claim())
        if is_finished(config, folder):
            remove_leftovers(folder)  # of a kill right after DONE
            return True
        if folder.is_done():
            folder.set_aside_ending()
        if end := end_to_extend(config):
            copy_end(end, folder)
        _write_start(config, folder, command)
        return False
    except UserError as error:
        return error
    except Exception as error:  # the other ranks would wait for this one
        traceback.print_exc()
        return RuntimeError(f"rank 0: {one_line_with_type(error)}")


def _write_start(config: TrainConfig, folder: RunFolder, command: list[str]) -> None:
    """Write the configuration and what the user typed."""
    write_atomic(folder.config_path, to_yaml(config))
    write_atomic(folder.command_path, "\n".join(command) + "\n")


def is_finished(config: TrainConfig, folder: RunFolder) -> bool:
    """Return whether a run is finished, and there is nothing to do.

    Raises:
        UserError: it is, and its folder is no longer whole.
        CannotStart: it lacks an output that this command asks for.
    """
    if not folder.is_done():
        return False
    problem = status_of(folder).problem
    if problem and config.resume != "scratch":
        choice = "add resume=scratch to start again (what is there moves to attempts/)"
        raise UserError(f"the run was finished, and is damaged: {problem}; {choice}")
    if not problem and (unmet := unmet_request(config, folder)):
        raise CannotStart(unmet)
    return not problem


def _print_notes(config: TrainConfig) -> None:
    if end := end_to_extend(config):
        print(f"goes on from step {end.step} of {end.path.parent.parent}", file=sys.stderr)
    elif line := note_of_other_epochs(config):
        print(f"note: {line}", file=sys.stderr)
    if line := note_of_idle_gpus(config):
        print(line, file=sys.stderr)


def print_resume(config: TrainConfig, folder: RunFolder) -> None:
    """Print the step from which a run resumed, and the checkpoints that it could not use: on the host of rank 0."""
    manifest = load_json(folder.manifest_path)
    if manifest.get("host") != socket.gethostname():
        return
    lines = [f"checkpoint not used: {line}" for line in manifest.get("unused_checkpoints", ())]
    if manifest.get("began_at_step"):
        why = " (resume=scratch is for damaged runs, this one is whole)" if config.resume == "scratch" else ""
        lines.append(f"resumed from step {manifest['began_at_step']}: {folder.path}{why}")
    for group in manifest.get("groups", ())[1:]:
        lines.append(f"went on with {group['num_ranks']} of {config.world_size} ranks from step {group['step']}")
    for line in lines:
        print(line, file=sys.stderr)


def stopped(folder: RunFolder, number: int) -> SystemExit:
    """Return the exit of a run that a signal stopped; SystemExit passes through a sweep's ``except Exception``.

    Args:
        number: of the signal, 0 where another process received it.
    """
    found = sorted(folder.checkpoints_path.glob("step-*"))
    state = f"saved as {found[-1]}: run the same command to resume" if found else NOTHING_SAVED
    print(f"stopped by {name_of(number) if number else 'a signal'}, {state}", file=sys.stderr)
    return SystemExit(exit_code(number or signal.SIGUSR1))


def run_rank(config: TrainConfig, folder: RunFolder, command: list[str], group: Group) -> bool:
    """Run one rank, or all ranks of a simulated run: load the data, train, and mark the run as done.

    Returns:
        False if a signal stopped the run, which is saved and can be resumed.
    """
    device, store = group
    with ExitStack() as owned:
        owned.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(config.cluster.num_threads or torch.get_num_threads())
        workers = owned.enter_context(closing(_workers_of(config, device, dist.get_world_size() if store else None)))
        trainer = owned.enter_context(closing(Trainer(config, workers, folder, store)))
        hosts = Counter(workers.gather_items(socket.gethostname()))
        if workers.is_main:
            manifest = _manifest(config, workers, trainer, folder, command, hosts)
            write_json(folder.manifest_path, manifest)
            if workers.plan:
                workers.plan.save(folder.plan_path)
            done, total = manifest["began_at_step"], manifest["steps"]
            trainer.follow(owned.enter_context(followed(config, folder, done=done, total=total)))
        started = time.perf_counter()

        def mark_done() -> None:
            weights = workers.task.model.state_dict()
            if config.save_weights:
                save_weights(weights, folder.weights_path)
            end = {"weights_sha256": weights_digest(weights), "wall_s": time.perf_counter() - started}
            write_done(folder, last_row(folder.epochs_path) | end, trainer.records)

        with stop_signals.recorded():
            is_done = trainer.run(mark_done)
    leave_group()  # not after an error: this would wait for ranks that may be gone
    return is_done


def _workers_of(config: TrainConfig, device: torch.device, num_ranks: int | None) -> Workers:
    """Return the workers of this process; where ranks are lost, the data is dealt among those that are there."""
    if num_ranks not in (None, config.world_size):
        config = replace(config, cluster=replace(config.cluster, world_size=num_ranks))
    return kind_of_workers(config)(config, load_task(config, device))


def _manifest(
    config: TrainConfig, workers: Workers, trainer: Trainer, folder: RunFolder, command: list[str], hosts: Counter[str]
) -> dict[str, Any]:
    began, task = trainer.position, workers.task
    return collect_manifest(
        seed=config.seed,
        command=command,
        world_size=config.world_size,
        data_checksums=task.content.checksums,
        extra={
            "data_unused": list(getattr(task.content, "unused", ())),  # files that lie beside the data
            "device": str(task.device),
            "processes": dict(hosts),
            "num_parameters": sum(p.numel() for p in task.model.parameters()),
            "steps": began.step + (config.epochs - began.epoch) * workers.num_steps - began.index,
            "began_at_step": began.step,
            "earlier_git": code_of_attempts(folder) if began.step else [],
            "unused_checkpoints": list(trainer.unused_checkpoints),
            **({"groups": trainer.groups} if trainer.groups else {}),
        },
    )


def main(path: str) -> None:
    """Be the rank of our launcher that the environment variables name, of the run whose folder this is."""
    die_with_parent(int(os.environ.pop(LAUNCHER_PID)))
    for number in STOP_SIGNALS:  # until it takes steps: Python's own handlers would wait for the end of a collective
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # SLURM sends it to all processes of a step; submitit handles it
    folder, code = RunFolder(Path(path)), 0
    try:
        with recorded_errors(folder, int(os.environ["RANK"])):
            config, command = from_yaml(folder.config_path), folder.command_path.read_text().splitlines()
            take_part(config, folder, command, start_group(config))
    except SystemExit as end:
        code = int(end.code or 0)
    except Exception:
        code = 1
        with suppress(OSError):  # its log may be on a full disk
            traceback.print_exc()
    end_process(code)  # a normal exit would wait for threads, which may wait for a peer


if __name__ == "__main__":
    main(sys.argv[1])
