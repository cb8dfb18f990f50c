"""What each process of a run does: ``python -m experiments.harness.worker RUN_DIR`` on every rank, or a call."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.harness.config import TrainConfig, from_yaml
from experiments.harness.loop import Trainer
from experiments.harness.manifest import collect_manifest
from experiments.harness.records import RunFolder, write_json
from experiments.harness.tasks import Task
from experiments.harness.teams import ProcessTeam, SimulatedTeam, Team, choose_device


def run_rank(config: TrainConfig, folder: RunFolder, command: list[str]) -> None:
    """Be one rank of a run, or all ranks of a simulated one, from loading data to DONE.

    Args:
        command: what the user typed, for the manifest.
    """
    device = start_group(config)
    with _team(config, device) as team:
        if team.is_main:
            write_json(folder.manifest_path, _manifest(config, team, command, device))
            if team.plan:
                team.plan.save(folder.plan_path)
        started = time.perf_counter()
        last = Trainer(config, team, folder).run()
        if team.is_main:
            folder.mark_done(last | {"wall_s": time.perf_counter() - started})


def start_group(config: TrainConfig) -> torch.device:
    """Join the other ranks, unless this process has done so already; return its device."""
    device = choose_device(config)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not config.cluster.simulated and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


@contextmanager
def _team(config: TrainConfig, device: torch.device) -> Iterator[Team]:
    task = Task.load(config, device)
    team: Team = SimulatedTeam(config, task) if config.cluster.simulated else ProcessTeam(config, task)
    try:
        yield team
    finally:
        team.close()
    if dist.is_initialized():
        dist.destroy_process_group()  # not after an error: others may be gone, and leaving would wait for them


def _manifest(config: TrainConfig, team: Team, command: list[str], device: torch.device) -> dict[str, Any]:
    num_parameters = sum(p.numel() for p in team.task.model.parameters())
    return collect_manifest(
        seed=config.seed,
        command=command,
        world_size=config.world_size,
        data_checksums=team.task.checksums,
        extra={"device": str(device), "num_parameters": num_parameters, "steps": config.epochs * team.num_batches},
    )


def main(run_dir: str) -> None:
    """Run the rank that the environment describes, as the configuration in the run folder says."""
    folder = RunFolder(Path(run_dir))
    command = (folder.path / "command.txt").read_text().splitlines()
    run_rank(from_yaml(folder.config_path), folder, command)


if __name__ == "__main__":
    main(sys.argv[1])
