"""The ranks between which rounds are exchanged."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from micro.comm import Comm


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter. Raises ValueError where there is none."""
    parameters = getattr(model, "parameters", None)
    first = next(iter(parameters()), None) if callable(parameters) else None
    if first is None:
        raise ValueError(f"model must be a torch.nn.Module with parameters, got {type(model).__name__}")
    return torch.device(first.device)


def ranks_of(replicas: Any, comm: Comm | None) -> Comm | dist.ProcessGroup | None:
    """Return the ranks that exchange: ``comm``, or ``replicas``, a process group; None: all ranks.

    Raises:
        ValueError: both are given, replicas is no process group, or there are no ranks.
    """
    if comm is not None and replicas is not None:
        raise ValueError("replicas and comm both say who the ranks are: give one of them")
    if comm is None and not dist.is_initialized():
        raise ValueError(
            "local steps need ranks to exchange with: call torch.distributed.init_process_group first, or give comm"
        )
    if replicas is not None and not isinstance(replicas, dist.ProcessGroup):
        raise ValueError(f"replicas must be a torch.distributed.ProcessGroup, got {type(replicas).__name__}")
    return replicas if comm is None else comm
