"""Python objects of all ranks: for set-up, saved states and the ends of runs, not for steps."""

import ctypes
import pickle

import torch
import torch.distributed as dist
from torch import Tensor

from micro.messages import all_gather_single


def gather_objects(item: object, group: dist.ProcessGroup | None = None) -> list[object]:
    """Return every rank's picklable ``item`` in rank order.

    torch's own all_gather_object needs numpy, which an installation of micro need not have.
    """
    own, lengths = _pickled(item, group)
    rows = [torch.empty_like(own) for _ in lengths]
    dist.all_gather(rows, own, group=group)
    return [_unpickled(row, length) for row, length in zip(rows, lengths, strict=True)]


def gather_objects_at_first(item: object, group: dist.ProcessGroup | None = None) -> list[object] | None:
    """Return every rank's picklable ``item`` in rank order on the group's first rank, None on all others."""
    own, lengths = _pickled(item, group)
    rows = [torch.empty_like(own) for _ in lengths] if dist.get_rank(group) == 0 else None
    dist.gather(own, rows, group=group, group_dst=0)
    return [_unpickled(row, length) for row, length in zip(rows, lengths, strict=True)] if rows else None


def _pickled(item: object, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """Return the item's bytes, filled up to the most that a rank has, and how many each rank has."""
    device = torch.device(dist.distributed_c10d._get_object_coll_device(group))
    content = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8).to(device)
    lengths = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    all_gather_single()(lengths, torch.tensor([content.numel()], device=device), group=group)
    return torch.nn.functional.pad(content, (0, int(lengths.max()) - content.numel())), lengths.tolist()


def _unpickled(content: Tensor, length: int) -> object:
    content = content.cpu()
    return pickle.loads(ctypes.string_at(content.data_ptr(), length))
