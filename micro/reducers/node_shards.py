"""Which elements of a vector each rank of a node owns: a slice of every parameter."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from micro.flat import Layout
from micro.partition import equal_slice
from micro.traffic import Bucket


class NodeShards:
    """The shards of a vector, one per rank of a node; each is the slices of all parameters, one after the other.

    A parameter of fewer elements than ranks has empty slices, and so may a shard be empty.

    Args:
        layout: of the vector.
        ranks_per_node: number of shards, at least 1.
    """

    def __init__(self, layout: Layout, ranks_per_node: int) -> None:
        self._layout = layout
        self._slices = [
            [equal_slice(numel, ranks_per_node, place) for numel in layout.numels] for place in range(ranks_per_node)
        ]
        self._sizes = [[stop - start for start, stop in slices] for slices in self._slices]
        self.numels = tuple(sum(sizes) for sizes in self._sizes)

    def layout(self, place: int) -> Layout | None:
        """Return names and shapes of a shard, as many dimensions as the parameters have; None where it is empty."""
        if not self.numels[place]:
            return None
        pairs = zip(self._sizes[place], self._layout.shapes, strict=True)
        return Layout(self._layout.names, tuple((size, *(1 for _ in shape[1:])) for size, shape in pairs))

    def apart(self, vector: Tensor) -> Tensor:
        """Return a copy of ``vector`` (numel,) in which the shards lie one after the other."""
        places = [
            slice(offset + start, offset + stop)
            for slices in self._slices
            for offset, (start, stop) in zip(self._layout.offsets, slices, strict=True)
        ]
        return torch.cat([vector[place] for place in places])

    def together(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the vector (numel,) whose shards these are."""
        pieces = [shard.split(sizes) for shard, sizes in zip(shards, self._sizes, strict=True)]
        return torch.cat([piece for parameter in zip(*pieces, strict=True) for piece in parameter])

    def positions(self, place: int, indices: Tensor) -> Tensor:
        """Return the indices of the vector, int64, of those (k,) of a shard."""
        ends = list(accumulate(self._sizes[place]))
        starts = [o + start for o, (start, _) in zip(self._layout.offsets, self._slices[place], strict=True)]
        shifts = [start - (end - size) for start, end, size in zip(starts, ends, self._sizes[place], strict=True)]
        slices = torch.searchsorted(torch.tensor(ends, device=indices.device), indices.long(), right=True)
        return indices.long() + torch.tensor(shifts, device=indices.device)[slices]


@lru_cache(maxsize=256)
def node_shards(layout: Layout, ranks_per_node: int) -> NodeShards:
    """Return the shards of a layout, made once for each of DDP's buckets."""
    return NodeShards(layout, ranks_per_node)


def node_buckets(bucket: Bucket, ranks_per_node: int) -> list[Bucket | None]:
    """Return what the ranks of each place reduce between nodes, in single precision at least; None: an empty shard."""
    shards = node_shards(bucket.named, ranks_per_node)
    shared = replace(
        bucket,
        world_size=bucket.world_size // ranks_per_node,
        element_bytes=max(4, bucket.element_bytes),
        longest_count=None,
    )
    return [
        replace(
            shared,
            numel=numel,
            layout=None if bucket.layout is None else shards.layout(place),
            local_count=None
            if bucket.local_count is None
            else bucket.local_count * numel * ranks_per_node / bucket.numel,
        )
        if numel
        else None
        for place, numel in enumerate(shards.numels)
    ]
