"""Helpers for measuring on ranks: the rank's device, and the time of the slowest rank."""

from typing import Any

import torch
import torch.distributed as dist

from micro.comm.group import GroupComm
from micro.comm.requests import AllGather

Row = dict[str, Any]
Settings = dict[str, Any]


def own_device() -> torch.device:
    """Return this rank's device: its GPU with the backend nccl, otherwise the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def slowest(value: float, device: torch.device) -> float:
    """Return the largest value over ranks, for instance the time of the slowest rank."""
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    return float(GroupComm().answer(AllGather(mine=mine)).max())
