"""On what kind of device the workers of a run compute, where its configuration leaves that open."""

import os
import sys
from pathlib import Path

from experiments.config.schema import IN_JOB, LAUNCH, ClusterConfig

_GPU_FILES = ("nvidiactl", "dxg", "kfd")  # of NVIDIA's driver, WSL's and AMD's: without them torch finds no GPU


def resolve_device(cluster: ClusterConfig, *, is_rank: bool) -> str:
    """Return what ``device=auto`` is: cuda where each worker here has a GPU of its own, else cpu.

    In a job of SLURM it is cuda where the job requests GPUs, so that a run has one name on every machine.

    Args:
        is_rank: whether torchrun or srun started this process; where it sees a GPU it is then auto still, until the
            ranks have met and told each other theirs.
    """
    slurm = cluster.slurm
    if slurm.gpus_per_node or cluster.rdzv_endpoint == IN_JOB or os.environ.get(LAUNCH):
        return "cuda" if slurm.gpus_per_node or any("gpu" in option for option in slurm.extra) else "cpu"
    if is_rank:
        return "auto" if num_gpus() else "cpu"
    return "cuda" if num_gpus() >= (1 if cluster.simulated else cluster.nproc_per_node) else "cpu"


def num_gpus() -> int:
    """Return how many GPUs this process sees."""
    if sys.platform == "linux" and not any(Path("/dev", name).exists() for name in _GPU_FILES):
        return 0
    import torch  # takes seconds

    return torch.cuda.device_count()
