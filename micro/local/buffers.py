"""What becomes of a model's buffers, such as batch norm's statistics, at the end of a round."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from micro.comm import Comm
from micro.requests import AllReduce, Broadcast

BufferPolicy = Literal["mean", "first", "own"]
"""Numbers with a fraction become their mean and others rank 0's; all become rank 0's; each rank keeps its own."""


def check_policy(policy: str) -> None:
    """Raise ValueError unless there is such a policy."""
    if policy not in get_args(BufferPolicy):
        raise ValueError(f"buffers must be one of {', '.join(get_args(BufferPolicy))}, got '{policy}'")


def learnt_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers that are part of the model's state."""
    parameters = {id(parameter) for parameter in model.parameters()}
    state = model.state_dict(keep_vars=True).values()
    return [tensor for tensor in state if isinstance(tensor, Tensor) and id(tensor) not in parameters]


def copies(model: nn.Module) -> list[Tensor]:
    """Return copies of the buffers that are part of the model's state."""
    return [buffer.detach().clone() for buffer in learnt_buffers(model)]


@torch.no_grad()
def exchange_(buffers: list[Tensor], policy: str, comm: Comm) -> float:
    """Make the buffers equal on all ranks, bit for bit; return the bytes that this rank sent."""
    if policy == "own" or comm.world_size == 1:
        return 0.0
    comm.begin_step()
    for buffer in buffers:
        if policy == "mean" and (buffer.is_floating_point() or buffer.is_complex()):
            buffer.copy_(comm.answer(AllReduce(mine=buffer.clone())) / comm.world_size)
        else:
            comm.answer(Broadcast(mine=buffer, source=0))
    return sum(comm.traffic.num_bytes.values())
