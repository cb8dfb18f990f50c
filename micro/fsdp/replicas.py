"""The ranks of other nodes that hold the same shard as this one."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from micro.fsdp.groups import ShardGroup


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
    shards = {tuple(ranks_of(group.process_group)) for group in groups}
    if len(shards) > 1:
        raise ValueError(f"parameters are sharded over different ranks, {sorted(shards)}: give fully_shard one mesh")
    others, own = ranks_of(replicas), dist.get_rank()
    if set(others) & set(next(iter(shards))) != {own}:
        raise ValueError(
            f"replicas must be the ranks that hold the same shard as rank {own}, got {others}, "
            f"and the model is sharded over {list(next(iter(shards)))}"
        )
    return replicas


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks of a group; None: this one alone."""
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
