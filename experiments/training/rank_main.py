"""The program of one rank, whoever started it: ``take_part``. Our launcher runs this module as ``python -m``."""

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.config.errors import UserError, one_line_with_type
from experiments.config.keys import from_yaml, to_yaml
from experiments.config.schema import TrainConfig
from experiments.config.stopping import NOTHING_SAVED, STOP_SIGNALS, exit_code, name_of
from experiments.launching.failures import recorded_errors
from experiments.launching.process_lifetime import LAUNCHER_PID, die_with_parent, leave
from experiments.launching.stalls import notes
from experiments.runs.checkpoints import remove_all
from experiments.runs.files import disk_errors, load_json, write_atomic, write_json
from experiments.runs.finished_requests import unmet_request
from experiments.runs.manifest import code_of_attempts, collect_manifest
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import status_of, write_done
from experiments.runs.stop_signals import stop_signals
from experiments.runs.weights import save_weights, weights_digest
from experiments.tracking.progress import followed
from experiments.training.group import Group, leave_group, start_group
from experiments.training.loop import Trainer
from experiments.training.tasks import Task, load_task
from experiments.training.workers import Workers
from micro.comm.objects import gather_objects

RUN = "MICRO_RUN"  # what our launcher gives its ranks: the configuration, and what the user typed


def take_part(config: TrainConfig, folder: RunFolder, command: list[str], group: Group | None = None) -> bool:
    """Carry out a run as one of its ranks, or as all of a simulated one; rank 0 owns the folder meanwhile.

    Args:
        command: what the user typed, for the manifest.
        group: of the ranks, where this one has joined it already.

    Returns:
        False if the run was finished before.

    Raises:
        UserError: the folder cannot be used; on all ranks alike.
        SystemExit: a signal stopped the run, which is saved; ``exit_code`` has the codes.
    """
    _, store = group = group or start_group(config)
    rank = dist.get_rank() if store else 0
    with disk_errors(folder.path), ExitStack() as owned:
        found = _begin(config, folder, command, owned) if rank == 0 else None
        is_over = gather_objects(found)[0] if store else found
        if isinstance(is_over, Exception):
            raise is_over
        if is_over:
            leave_group()
            return False
        owned.enter_context(recorded_errors(folder, rank))
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
            remove_all(folder)  # a kill right after DONE left them
            return True
        if folder.is_done():
            folder.set_aside_ending()
        write_atomic(folder.config_path, to_yaml(config))
        write_atomic(folder.path / "command.txt", "\n".join(command) + "\n")
        return False
    except UserError as error:
        return error
    except Exception as error:  # the other ranks would wait for this one
        traceback.print_exc()
        return RuntimeError(f"rank 0: {one_line_with_type(error)}")


def is_finished(config: TrainConfig, folder: RunFolder) -> bool:
    """Return whether a run is finished, and there is nothing to do.

    Raises:
        UserError: it is, and its folder is no longer whole, or it has not what is asked for now.
    """
    if not folder.is_done():
        return False
    problem = status_of(folder).problem
    if problem and config.resume != "scratch":
        choice = "add resume=scratch to start again (what is there moves to attempts/)"
        raise UserError(f"the run was finished, and is damaged: {problem}; {choice}")
    if not problem and (unmet := unmet_request(config, folder)):
        raise UserError(unmet)
    return not problem


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


def run_rank(config: TrainConfig, folder: RunFolder, command: list[str], group: Group | None = None) -> bool:
    """Run one rank, or all ranks of a simulated run: load the data, train, and mark the run as done.

    Returns:
        False if a signal stopped the run, which is saved and can be resumed.
    """
    device, store = group or start_group(config)
    there = config
    if store and dist.get_world_size() != config.world_size:  # some are lost: the data is dealt among those there
        there = replace(config, cluster=replace(config.cluster, world_size=dist.get_world_size()))
    with _threads(config.cluster.num_threads), ExitStack() as owned:
        workers = owned.enter_context(closing(kind_of_workers(there)(there, load_task(there, device))))
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

        def mark_done(last_row: dict[str, Any]) -> None:
            weights = workers.task.model.state_dict()
            if config.save_weights:
                save_weights(weights, folder.weights_path)
            end = {"weights_sha256": weights_digest(weights), "wall_s": time.perf_counter() - started}
            write_done(folder, last_row | end, trainer.records)

        with stop_signals.recorded():
            is_done = trainer.run(mark_done)
    leave_group()  # not after an error: this would wait for ranks that may be gone
    return is_done


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Set the number of threads of torch's operations in this context; None leaves it as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def kind_of_workers(config: TrainConfig) -> Callable[[TrainConfig, Task], Workers]:
    """Return what workers the run has, and load no others: in this process or not, exchanging at each step or round."""
    if config.rounds.every:
        from experiments.training.round_workers import RoundWorkers

        return RoundWorkers
    if config.cluster.simulated:
        from experiments.training.simulated_workers import SimulatedWorkers

        return SimulatedWorkers
    from experiments.training.ddp_workers import DdpWorkers

    return DdpWorkers


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
    given, folder, code = json.loads(os.environ.pop(RUN)), RunFolder(Path(path)), 0
    try:
        with recorded_errors(folder, int(os.environ["RANK"])):
            take_part(from_yaml(StringIO(given["config"])), folder, given["command"])
    except SystemExit as end:
        code = int(end.code or 0)
    except Exception:
        code = 1
        with suppress(OSError):  # its log may be on a full disk
            traceback.print_exc()
    leave(code)  # a normal exit would wait for threads, which may wait for a peer


if __name__ == "__main__":
    main(sys.argv[1])
