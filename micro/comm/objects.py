"""Exchange Python objects and bytes between ranks, for set-up, saved states and ends of runs, not in steps."""

import ctypes
import io

import torch
import torch.distributed as dist
from torch import Tensor

from micro.comm.group import ALL_GATHER

CHUNK_BYTES = 1 << 26  # of a rank, that are on a device at a time


def gather_objects(item: object, group: dist.ProcessGroup | None = None) -> list[object]:
    """Return every rank's ``item`` in rank order, with tensors on the CPU; torch must be able to save it.

    torch's own all_gather_object needs numpy, which an installation of micro need not have, and it brings tensors back
    to the devices of the ranks that they came from.
    """
    gathered = _gathered(item, group, first=False)
    assert gathered is not None
    return gathered


def gather_objects_at_first(item: object, group: dist.ProcessGroup | None = None) -> list[object] | None:
    """Return what `gather_objects` does on the group's first rank, None on all others."""
    return _gathered(item, group, first=True)


def broadcast_bytes(content: bytes, source: int, group: dist.ProcessGroup | None = None) -> bytes:
    """Return on all ranks of a group the bytes that its rank ``source`` gives; those of the others are ignored."""
    device = torch.device(dist.distributed_c10d._get_object_coll_device(group))
    length = torch.tensor([len(content)], device=device)
    dist.broadcast(length, group=group, group_src=source)
    is_source = dist.get_rank(group) == source
    whole = as_tensor(content) if is_source else torch.empty(int(length), dtype=torch.uint8)
    for piece in whole.split(CHUNK_BYTES):
        sent = piece.to(device)
        dist.broadcast(sent, group=group, group_src=source)
        piece.copy_(sent)
    return content if is_source else ctypes.string_at(whole.data_ptr(), whole.numel())


def as_tensor(content: bytes) -> Tensor:
    """Return bytes as (n,) uint8, copied."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _gathered(item: object, group: dist.ProcessGroup | None, *, first: bool) -> list[object] | None:
    device = torch.device(dist.distributed_c10d._get_object_coll_device(group))
    stored = io.BytesIO()
    torch.save(item, stored)
    own = torch.frombuffer(stored.getbuffer(), dtype=torch.uint8)
    lengths = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    ALL_GATHER(lengths, torch.tensor([own.numel()], device=device), group=group)
    own = torch.nn.functional.pad(own, (0, int(lengths.max()) - own.numel()))
    receives = not first or dist.get_rank(group) == 0
    pieces: list[list[Tensor]] = []
    for sent in own.split(CHUNK_BYTES):
        sent = sent.to(device)
        rows = [torch.empty_like(sent) for _ in lengths] if receives else []
        if first:
            dist.gather(sent, rows or None, group=group, group_dst=0)
        else:
            dist.all_gather(rows, sent, group=group)
        pieces.append([row.cpu() for row in rows])
    if not receives:
        return None
    whole = [torch.cat(of_rank) for of_rank in zip(*pieces, strict=True)]
    return [_restored(content, length) for content, length in zip(whole, lengths.tolist(), strict=True)]


def _restored(content: Tensor, length: int) -> object:
    stored = io.BytesIO(ctypes.string_at(content.data_ptr(), length))
    return torch.load(stored, map_location="cpu", weights_only=False)
