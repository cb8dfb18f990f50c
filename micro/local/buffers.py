"""Synchronise a model's buffers, such as batch norm statistics, at the end of a round."""

import json
import zlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Literal

import torch
from torch import Tensor, nn

from micro.comm.ranks import Comm
from micro.comm.requests import AllGather, AllGatherLists, AllReduce, Broadcast
from micro.drivers.meeting import content_of
from micro.drivers.wrappers import plain_names

BufferPolicy = Literal["mean", "first", "own"]
"""'mean': average floating-point buffers, copy others from rank 0; 'first': copy all from rank 0; 'own': keep them."""


class Buffers:
    """The buffers in a model's state dict.

    Attributes:
        policy: how they are synchronised at the end of a round.
        kept: copies from the end of the last round, by name.
    """

    def __init__(self, model: nn.Module, policy: BufferPolicy | str) -> None:
        self._model, self.policy = model, str(policy)
        self.kept = self.copies()

    def copies(self) -> dict[str, Tensor]:
        """Return copies of the current buffers, by name."""
        return {name: getattr(module, key).detach().clone() for name, (module, key) in self._places().items()}

    def take(self, exchanged: Mapping[str, Tensor]) -> None:
        """Write the exchanged buffers into the model, unless each rank keeps its own, and store copies."""
        if self.policy != "own":
            self._write(exchanged)
        self.kept = self.copies()

    def restore(self) -> None:
        """Restore the buffers of the last round; buffers registered since are unchanged."""
        self._write(self.kept)

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        places = self._places()
        for name, value in values.items():
            if name not in places:  # removed since
                continue
            module, key = places[name]
            buffer = getattr(module, key)
            if buffer.shape == value.shape and buffer.dtype == value.dtype:
                buffer.copy_(value)
            else:
                setattr(module, key, value.clone())

    def _places(self) -> dict[str, tuple[nn.Module, str]]:
        """Return for each buffer, by its name without wrappers, its module and its name there."""
        found = {
            id(buffer): (f"{path}.{key}" if path else key, module, key)
            for path, module in self._model.named_modules()
            for key, buffer in module.named_buffers(recurse=False)
            if key not in module._non_persistent_buffers_set
        }
        plain = plain_names(name for name, *_ in found.values())
        return {plain[name]: (module, key) for name, module, key in found.values()}


def digest(buffers: Mapping[str, Tensor]) -> int:
    """Return a 32-bit checksum of the buffers' names, shapes and dtypes."""
    return zlib.crc32(_described(buffers))


@torch.no_grad()
def exchange_buffers(
    buffers: Mapping[str, Tensor], policy: str, comm: Comm, digests: Sequence[float], device: torch.device
) -> float:
    """Synchronise copies of buffers, bit for bit, according to the policy; return the bytes that this rank sent.

    Args:
        digests: of each rank's buffers.
        device: of the model.

    Raises:
        RuntimeError: on all ranks, if a buffer is missing on a rank or differs in shape or dtype.
    """
    if policy == "own" or comm.world_size == 1:
        return 0.0
    comm.begin_step()
    if len(set(digests)) > 1:
        raise RuntimeError(_first_difference(buffers, comm, device))
    for buffer in buffers.values():
        if policy == "mean" and (buffer.is_floating_point() or buffer.is_complex()):
            buffer.copy_(comm.answer(AllReduce(mine=buffer.clone())) / comm.world_size)
        else:
            comm.answer(Broadcast(mine=buffer, source=0))
    return sum(comm.traffic.num_bytes.values())


def _described(buffers: Mapping[str, Tensor]) -> bytes:
    return json.dumps({name: f"{tuple(each.shape)} {each.dtype}" for name, each in buffers.items()}).encode()


def _first_difference(buffers: Mapping[str, Tensor], comm: Comm, device: torch.device) -> str:
    """Return a message about the first buffer that differs between two ranks, equal on all ranks; a collective."""
    own = torch.frombuffer(bytearray(_described(buffers)), dtype=torch.uint8).to(device)
    lengths = comm.answer(AllGather(mine=torch.tensor([own.numel()], device=device)))[:, 0].tolist()  # host sync: error
    gathered = comm.answer(AllGatherLists(mine=own, counts=lengths, kind="counts"))
    first, *others = [json.loads(content_of(part)) for part in gathered.split(lengths)]
    for rank, other in enumerate(others, 1):
        for one, two in zip_longest(first.items(), other.items(), fillvalue=None):
            if one != two:
                words = [f"'{each[0]}' {each[1]}" if each else "no more" for each in (one, two)]
                return (
                    f"buffers must be the same on all ranks, rank 0 has {words[0]}, rank {rank} {words[1]}: make them "
                    'equal, or give LocalSteps buffers="own"'
                )
    raise AssertionError("descriptions are equal")
