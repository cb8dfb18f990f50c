"""Helpers of measurements on several ranks: start them, choose a rank's device, take the slowest rank's time."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from experiments.launching.process_lifetime import exit_at_termination
from experiments.launching.rank_group import RankGroup
from micro.comm import GroupComm

Row = dict[str, Any]
Settings = dict[str, Any]


def measure(work: Callable[[Settings], list[Row]], settings: Settings, nproc: int) -> list[Row]:
    """Call ``work(settings)`` on ``nproc`` ranks, on GPUs if each rank can have one, and return rank 0's rows.

    Raises:
        RankFailure: a rank failed.
    """
    backend = "nccl" if torch.cuda.device_count() >= nproc else "gloo"
    with exit_at_termination(), RankGroup(nproc, backend=backend) as ranks:
        rows: list[Row] = ranks.call(work, settings)[0]
    return rows


def own_device() -> torch.device:
    """Return the device on which this rank measures: its own GPU with the backend nccl, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def slowest(value: float, device: torch.device) -> float:
    """Return the largest value of all ranks: a step lasts until its slowest rank is done."""
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    return float(GroupComm(timed=False).gather_rows(mine).max())
