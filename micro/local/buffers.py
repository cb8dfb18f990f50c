"""A model's buffers, such as batch norm's statistics, at the ends of rounds."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from micro.comm import Comm
from micro.requests import AllReduce, Broadcast

BufferPolicy = Literal["mean", "first", "own"]
"""Numbers with a fraction become their mean and others rank 0's; all become rank 0's; each rank keeps its own."""


class Buffers:
    """The buffers that are part of a model's state.

    Attributes:
        policy: what becomes of them at the end of a round.
        kept: copies of them as they were then.
    """

    def __init__(self, model: nn.Module, policy: BufferPolicy | str) -> None:
        self._model, self.policy = model, str(policy)
        self.kept = self.copies()

    def copies(self) -> list[Tensor]:
        """Return copies of them as they are."""
        return [buffer.detach().clone() for buffer in self._own()]

    def take(self, exchanged: Sequence[Tensor]) -> None:
        """Give the model what ranks have exchanged, unless each keeps its own, and keep what it has then."""
        if self.policy != "own":
            self._write(exchanged)
        self.kept = self.copies()

    def restore(self) -> None:
        """Give the model those of the last round."""
        self._write(self.kept)

    def _write(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self._own(), values, strict=True):
            buffer.copy_(value)

    def _own(self) -> list[Tensor]:
        found = {
            id(buffer): buffer
            for module in self._model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        }
        return list(found.values())


@torch.no_grad()
def exchange_buffers(buffers: Sequence[Tensor], policy: str, comm: Comm) -> float:
    """Make copies of buffers equal on all ranks, bit for bit, as the policy says; return the bytes that a rank sent."""
    if policy == "own" or comm.world_size == 1:
        return 0.0
    comm.begin_step()
    for buffer in buffers:
        if policy == "mean" and (buffer.is_floating_point() or buffer.is_complex()):
            buffer.copy_(comm.answer(AllReduce(mine=buffer.clone())) / comm.world_size)
        else:
            comm.answer(Broadcast(mine=buffer, source=0))
    return sum(comm.traffic.num_bytes.values())
