"""Main of a rank: ``python -m experiments.training.rank_main RUN_DIR`` on every rank, or a call of ``run_rank``."""

import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig, from_yaml
from experiments.launching.rank_process import announce_saving
from experiments.launching.store_server import serve_store
from experiments.launching.watching.beats import activity
from experiments.runs.atomic_files import write_json
from experiments.runs.ending import write_done
from experiments.runs.manifest import code_of_attempts, collect_manifest
from experiments.runs.run_folder import RunFolder
from experiments.runs.stop_signals import stop_signals
from experiments.runs.weights import save_weights, weights_digest
from experiments.training.ddp_workers import DdpWorkers
from experiments.training.devices import choose_device
from experiments.training.groups import plain, with_ranks_there
from experiments.training.loop import Trainer
from experiments.training.round_workers import RealRoundWorkers, SimulatedRoundWorkers
from experiments.training.simulated_workers import SimulatedWorkers
from experiments.training.tasks import Task, load_task
from experiments.training.waiting import waiting
from experiments.training.workers import Workers


def run_rank(
    config: TrainConfig, folder: RunFolder, command: list[str], *, begin: Callable[[], None] = lambda: None
) -> bool:
    """Run one rank, or all ranks of a simulated run: load the data, train, and mark the run as done.

    Args:
        command: what the user typed, for the manifest.
        begin: called when all is loaded and built, before the first step.

    Returns:
        False if a signal stopped the run, which is saved and can be resumed.
    """
    device, store = start_group(config)
    there = with_ranks_there(config, dist.get_world_size()) if store else config
    with _threads(config.cluster.num_threads), _workers(there, device) as workers, ExitStack() as owned:
        trainer = owned.enter_context(closing(Trainer(config, workers, folder, store)))
        hosts = Counter(workers.gather_items(socket.gethostname()))
        if workers.is_main:
            write_json(folder.manifest_path, _manifest(config, workers, trainer, folder, command, hosts))
            if workers.plan:
                workers.plan.save(folder.plan_path)
        started = time.perf_counter()
        begin()

        def mark_done(last_row: dict[str, Any]) -> None:
            weights = workers.task.model.state_dict()
            if config.save_weights:
                save_weights(weights, folder.weights_path)
            end = {"weights_sha256": weights_digest(weights), "wall_s": time.perf_counter() - started}
            write_done(folder, last_row | end, trainer.records)

        return trainer.run(mark_done)


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Set the number of threads of torch's operations in this context; None leaves it as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def start_group(config: TrainConfig) -> tuple[torch.device, dist.Store | None]:
    """Join the process group if this process has not; return its device, and the store that the ranks share.

    Raises:
        NoOwnGpu: as ``device_of_rank``, before the group is made.
    """
    global _store
    activity.waiting = waiting
    is_new = not config.cluster.simulated and not dist.is_initialized()
    if is_new:
        limit = timedelta(seconds=config.cluster.timeout_s)
        served = _served_store(limit)
        _store, rank, world_size = next(dist.rendezvous("env://", timeout=limit))
        del served  # torch's own store has shared it
        _store = dist.PrefixStore(_attempt(), _store)
    store = None if config.cluster.simulated else _store
    device = choose_device(config, store)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if is_new:
        assert store is not None
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world_size, timeout=limit
        )
    return device, store


def _served_store(limit: timedelta) -> dist.Store | None:
    """Return the store of the ranks where this is rank 0, and the launcher does not have it already."""
    variables = os.environ
    if variables["RANK"] != "0" or variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return serve_store(variables["MASTER_ADDR"], int(variables["MASTER_PORT"]), limit)


def _attempt() -> str:
    """Return a prefix for the store's keys: after a restart of the ranks the store may still hold old addresses.

    On one node it is the number of restarts. Several nodes may count differently: the launcher gives each start of
    theirs a store of its own.
    """
    alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if alone else "attempt"


_store: dist.Store | None = None  # of the process group


@contextmanager
def _workers(config: TrainConfig, device: torch.device) -> Iterator[Workers]:
    task = load_task(config, device)
    workers = kind_of_workers(config)(config, task)
    try:
        yield workers
    finally:
        workers.close()
    if dist.is_initialized():
        dist.destroy_process_group()  # not after an error: this would wait for ranks that may be gone


def kind_of_workers(config: TrainConfig) -> Callable[[TrainConfig, Task], Workers]:
    """Return what workers the run has: in this process or not, with an exchange at every step or of rounds."""
    if config.rounds.every:
        return SimulatedRoundWorkers if config.cluster.simulated else RealRoundWorkers
    return SimulatedWorkers if config.cluster.simulated else DdpWorkers


def _manifest(
    config: TrainConfig,
    workers: Workers,
    trainer: Trainer,
    folder: RunFolder,
    command: list[str],
    hosts: Mapping[str, int],
) -> dict[str, Any]:
    num_parameters = sum(p.numel() for p in workers.task.model.parameters())
    began = trainer.position
    steps_left = (config.epochs - began.epoch) * workers.num_steps - began.index
    return collect_manifest(
        seed=config.seed,
        command=command,
        world_size=config.world_size,
        data_checksums=workers.task.checksums,
        extra={
            "data_unused": list(workers.task.unused),
            "device": str(workers.task.device),
            "processes": dict(hosts),
            "num_parameters": num_parameters,
            "steps": began.step + steps_left,
            "began_at_step": began.step,
            "earlier_git": code_of_attempts(folder.attempts_path) if began.step else [],
            "passed_over": list(trainer.passed_over),
            **({"groups": plain(trainer.groups)} if trainer.groups else {}),
        },
    )


def main(run_dir: str) -> None:
    """Run the rank that the environment variables name, with the configuration in the run folder."""
    folder = RunFolder(Path(run_dir))
    command = (folder.path / "command.txt").read_text().splitlines()
    with ExitStack() as owned:
        owned.enter_context(stop_signals.recorded(signal.SIGTERM))
        if os.environ["RANK"] == "0":
            owned.enter_context(folder.claim())
            if folder.is_done():
                raise UserError(f"another process has just finished {folder.path}")
        run_rank(from_yaml(folder.config_path), folder, command, begin=partial(announce_saving, folder.path))


if __name__ == "__main__":
    main(sys.argv[1])
