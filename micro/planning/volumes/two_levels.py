"""The collectives of two levels: dense within a node, those of another reducer between nodes."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from micro.planning.volumes.bucket import Bucket
from micro.planning.volumes.calls import COUNT_BYTES, Call, Calls, Volume
from micro.reducers.node_exchange import INDEX_BYTES
from micro.reducers.node_shards import node_shards

NUM_FACTS = 4  # of a shard in the header of a node, beside a count for each node


def joined(bucket: Bucket, ranks_per_node: int, volume_between: Callable[[Bucket], Volume]) -> Volume:
    """Return the collectives of micro.TwoLevel.

    Args:
        volume_between: returns those of its reducer for one shard, among the ranks of one place in all nodes.

    Raises:
        ValueError: the ranks do not fill nodes of this size.
    """
    if bucket.world_size % ranks_per_node:
        raise ValueError(
            f"ranks_per_node must divide the number of ranks, got {ranks_per_node} for {bucket.world_size} ranks"
        )
    of_shard = cache(volume_between)  # most shards are equal
    shards = [of_shard(shard) if shard else None for shard in _shards(bucket, ranks_per_node)]
    num_updated = sum(shard.num_updated for shard in shards if shard)
    return Volume(
        world_size=bucket.world_size,
        ranks_per_node=ranks_per_node,
        local_calls=_local_calls(bucket, ranks_per_node, num_updated) if ranks_per_node > 1 else (),
        place_calls=tuple(shard.calls if shard else () for shard in shards),
        num_updated=num_updated,
    )


def _shards(bucket: Bucket, ranks_per_node: int) -> list[Bucket | None]:
    """Return what the ranks of each place reduce between nodes, in single precision at least; None: an empty shard."""
    shards = node_shards(bucket.named, ranks_per_node)
    shared = replace(bucket, world_size=bucket.world_size // ranks_per_node, element_bytes=max(4, bucket.element_bytes))
    return [
        replace(
            shared,
            numel=numel,
            layout=None if bucket.layout is None else shards.layout(place),
            longest_count=None,
            local_count=None
            if bucket.local_count is None
            else bucket.local_count * numel * ranks_per_node / bucket.numel,
        )
        if numel
        else None
        for place, numel in enumerate(shards.numels)
    ]


def _local_calls(bucket: Bucket, ranks_per_node: int, num_updated: float) -> Calls:
    """Return what the ranks of a node send each other: gradients, a header, and updates, as pairs or whole."""
    share, width = bucket.numel / ranks_per_node, bucket.element_bytes
    gradients: Call = ("scatter", (bucket.numel - share) * width)
    header: Call = ("gather_rows", COUNT_BYTES * (NUM_FACTS + bucket.world_size // ranks_per_node))
    updated = round(num_updated)
    if updated * (INDEX_BYTES + width) >= bucket.numel * width:
        return gradients, header, ("gather_lists", share * width)
    pairs: Calls = tuple(("gather_lists", size * updated / ranks_per_node) for size in (INDEX_BYTES, width))
    return gradients, header, *pairs
