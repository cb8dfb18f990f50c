"""What is checked before training: that the ranks of a replica group hold the same shards of the same model."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from micro.comm import Comm
from micro.fsdp.groups import ShardGroup
from micro.objects import gather_objects
from micro.requests import AllReduce, Broadcast


def replica_group(replicas: dist.ProcessGroup | DeviceMesh | None, groups: Sequence[ShardGroup]) -> dist.ProcessGroup:
    """Return the ranks that hold the same shard as this one.

    Raises:
        ValueError: they are not given, or cannot be such ranks, or FSDP averages over replicas by itself.
    """
    if any(group.has_replicas for group in groups):
        raise ValueError(
            "model is sharded over a mesh with replicas, which FSDP averages densely by itself: shard it over the "
            "ranks of a node alone, fully_shard(model, mesh=mesh['local']), and give replicas=mesh['node']"
        )
    if replicas is None:
        raise ValueError(
            "model has no replicas: its gradients are reduced shard by shard, and nothing is left to exchange. "
            "Shard it within each node, fully_shard(model, mesh=mesh['local']), and give replicas=mesh['node']"
        )
    num_dims = max(group.num_mesh_dims for group in groups)
    if num_dims > 1:
        raise ValueError(
            f"model is sharded over a mesh of {num_dims} dimensions, attach_fsdp takes one, that of fully_shard: "
            "leave out tensor parallelism"
        )
    if isinstance(replicas, DeviceMesh):
        if replicas.ndim != 1:
            raise ValueError(f"replicas must be a mesh of one dimension, got {replicas.ndim}: give mesh['node']")
        replicas = replicas.get_group()
    shards = {tuple(_ranks(group.process_group)) for group in groups}
    if len(shards) > 1:
        raise ValueError(f"parameters are sharded over different ranks, {sorted(shards)}: give fully_shard one mesh")
    others, own = _ranks(replicas), dist.get_rank()
    if set(others) & set(next(iter(shards))) != {own}:
        raise ValueError(
            f"replicas must be the ranks that hold the same shard as rank {own}, got {others}, "
            f"and the model is sharded over {list(next(iter(shards)))}"
        )
    return replicas


@contextmanager
def refused_together(replicas: dist.ProcessGroup, groups: Sequence[ShardGroup]) -> Iterator[None]:
    """Raise a ValueError on every rank of all nodes where this context raises on any; all ranks enter it.

    A rank that went on alone would wait for the others until the timeout.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # whatever it is, the others must not wait
        error = caught
    words = None if error is None else f"rank {dist.get_rank()} refused to attach: {error}"
    with _device_of(groups):
        words = _first(words, replicas)
        words = _first(words, groups[0].process_group)
    if error is not None:
        raise error
    if words is not None:
        raise ValueError(words)


def check_alike(
    groups: Sequence[ShardGroup], settings: tuple[object, str], comm: Comm, replicas: dist.ProcessGroup
) -> None:
    """Raise ValueError on all ranks unless all replicas hold the same shard of the same weights.

    Args:
        settings: the reducer, and all others.
        comm: the replicas; the ranks of ``replicas``.
    """
    node = groups[0].process_group
    local = {name: shard for group in groups for name, shard in group.local().items()}
    shapes = {name: tuple(shard.shape) for name, shard in local.items()}
    place = None if node is None else (dist.get_rank(node), dist.get_world_size(node))
    with _device_of(groups):
        raise_together(_difference((place, shapes, *map(str, settings)), replicas), node)
        raise_together(_first_other(local, comm), node)


def raise_together(problem: str | None, node: dist.ProcessGroup | None) -> None:
    """Raise ValueError on all ranks of ``node`` where any of them has a problem."""
    first = _first(problem, node)
    if first is not None:
        raise ValueError(first)


def _first(words: str | None, group: dist.ProcessGroup | None) -> str | None:
    """Return the words of the first rank of the group that has any."""
    said = [words] if group is None else gather_objects(words, group)
    return next((str(each) for each in said if each is not None), None)


def _device_of(groups: Sequence[ShardGroup]) -> AbstractContextManager[object]:
    """Return the context in which NCCL sends words from the device of the model."""
    device = groups[0].device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _difference(own: tuple[object, ...], replicas: dist.ProcessGroup) -> str | None:
    """Return in words how the replicas differ in anything but their weights; the same on all of them."""
    first, *others = gather_objects(own, replicas)
    assert isinstance(first, tuple)
    for rank, other in zip(_ranks(replicas)[1:], others, strict=True):
        assert isinstance(other, tuple)
        for what, one, two in zip(
            ("shard and number of shards", "parameters", "reducer", "settings"), first, other, strict=True
        ):
            if one != two:
                shown = "" if what == "parameters" else f", {one} and {two}"
                return f"{what} of replicas must be the same, ranks {_ranks(replicas)[0]} and {rank} differ{shown}"
    return None


def _first_other(local: dict[str, Tensor], comm: Comm) -> str | None:
    """Return in words which weights are not those of the first replica; the same on all of them."""
    differ = []
    for name, shard in local.items():
        if shard.is_meta:
            return f"parameter '{name}' has no values yet: initialise the weights before attach_fsdp"
        bits = shard.detach().contiguous().view(-1).view(torch.uint8)
        first = comm.answer(Broadcast(mine=bits.clone(), source=0)) if bits.numel() else bits
        differ.append(not torch.equal(bits, first))
    mine = torch.tensor(differ, dtype=torch.int32, device=next(iter(local.values())).device)
    counts = comm.answer(AllReduce(mine=mine, kind="counts")).tolist()
    for name, count in zip(local, counts, strict=True):
        if count:
            return (
                f"replicas must start with the same weights, '{name}' differs: draw them from the same seed on all "
                "nodes, or load the same checkpoint"
            )
    return None


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
