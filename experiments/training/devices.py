"""Choose the device on which a process of a run computes."""

import os

import torch

from experiments.config.schema import TrainConfig


def choose_device(config: TrainConfig) -> torch.device:
    """Return this process's device: its own GPU if this node has one for each process, else the CPU."""
    num_processes = (
        1 if config.cluster.simulated else int(os.environ.get("LOCAL_WORLD_SIZE", config.cluster.nproc_per_node))
    )
    if config.cluster.device == "cpu" or (
        config.cluster.device == "auto" and torch.cuda.device_count() < num_processes
    ):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
