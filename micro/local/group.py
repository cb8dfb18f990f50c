"""The ranks between which rounds are exchanged."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from micro.comm import Comm
from micro.private_comm import PrivateComm


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter. Raises ValueError where there is none."""
    parameters = getattr(model, "parameters", None)
    first = next(iter(parameters()), None) if callable(parameters) else None
    if first is None:
        raise ValueError(f"model must be a torch.nn.Module with parameters, got {type(model).__name__}")
    return torch.device(first.device)


def comm_of(model: nn.Module, replicas: Any, comm: Comm | None) -> Comm:
    """Return ``comm``, or a group of its own with the ranks of ``replicas``, a process group; None: all ranks.

    Raises:
        ValueError: both are given, replicas is no process group, or there are no ranks.
    """
    if comm is not None:
        if replicas is not None:
            raise ValueError("replicas and comm both say who the ranks are: give one of them")
        return comm
    if not dist.is_initialized():
        raise ValueError(
            "local steps need ranks to exchange with: call torch.distributed.init_process_group first, or give comm"
        )
    if replicas is not None and not isinstance(replicas, dist.ProcessGroup):
        raise ValueError(f"replicas must be a torch.distributed.ProcessGroup, got {type(replicas).__name__}")
    return PrivateComm(replicas, device_of(model))
