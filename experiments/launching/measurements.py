"""Helpers of measurements on several ranks: start them, choose a rank's device, take the slowest rank's time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
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
    with ranks_of_measurement(nproc) as ranks:
        rows: list[Row] = ranks.call(work, settings)[0]
    return rows


@contextmanager
def ranks_of_measurement(nproc: int, code: Path | None = None) -> Iterator[RankGroup]:
    """Yield ``nproc`` ranks, on GPUs if each can have one, that end with this process; ``code`` as in RankGroup."""
    backend = "nccl" if torch.cuda.device_count() >= nproc else "gloo"
    with exit_at_termination(), RankGroup(nproc, backend=backend, code=code) as ranks:
        yield ranks


def own_device() -> torch.device:
    """Return the device on which this rank measures: its own GPU with the backend nccl, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def slowest(value: float, device: torch.device) -> float:
    """Return the largest value of all ranks: a step lasts until its slowest rank is done."""
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    return float(GroupComm(timed=False).gather_rows(mine).max())
